"""A pattern put through the model."""

from __future__ import annotations

from patterns import Pattern

from nbmemprof import access as model

OF = {"global load": model.global_load, "global store": model.global_store, "shared load": model.shared_load, "shared store": model.shared_store}


def access(pattern: Pattern) -> model.GlobalAccess | model.SharedAccess:
    return OF[pattern.space](pattern.places, pattern.width)


def count(made: model.GlobalAccess | model.SharedAccess) -> int:
    """Sectors or wavefronts."""
    return made.sectors if isinstance(made, model.GlobalAccess) else made.wavefronts
