"""Which file name IPython gave to which cell."""

from __future__ import annotations

from nbmemprof import _optional

__all__ = ["cell_names"]


def cell_names() -> dict[str, str]:
    """File name that IPython gave to a cell's code → ``In[7]``; empty outside IPython."""
    ipython = _optional.loaded("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    known = getattr(getattr(shell, "compile", None), "_filename_map", None)
    return {str(name): f"In[{count}]" for name, count in dict(known or {}).items()}
