"""Memory of a step on a GPU that is not here: the user's code under fake tensors, through the allocator's model.

Entry points: :func:`nbmemprof.prediction.run.predict` (``mp.predict``) and, inside any process,
:func:`nbmemprof.prediction.engine.fake_run`.
"""
