"""How much fits: the largest batch of a step, found with few real tries, and what a sweep of settings would need.

Entry points: :func:`nbmemprof.searching.batch.max_batch` (``mp.max_batch``), :func:`nbmemprof.searching.sweeping.sweep` (``mp.sweep``).
"""
