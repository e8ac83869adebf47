"""``python -m nbmemprof.gpu._ncu_child CALL``: opens a pickled ``(function, args)`` and calls it between the profiler's start and stop."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from nbmemprof.gpu import _context


def main(path: str) -> None:
    """Call what is in the file; ncu counts what it launches."""
    function, args = pickle.loads(Path(path).read_bytes())  # noqa: S301 - written by our own parent process, in its private folder
    context = _context.current()
    context.synchronize()
    context.driver.cuProfilerStart()
    try:
        function(*args)
        context.synchronize()
    finally:
        context.driver.cuProfilerStop()


if __name__ == "__main__":
    main(sys.argv[1])
