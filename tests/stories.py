"""A training run as a trace: weights, activations, gradients, optimizer state, and what the test adds after each step."""

from __future__ import annotations

from strategies import KIB, Allocator, frames

CALL = "lib/python3.12/site-packages/torch/nn/modules/module.py:1786 _call_impl"
LINEAR = "lib/python3.12/site-packages/torch/nn/modules/linear.py:134 forward"
ADAM = "lib/python3.12/site-packages/torch/optim/adam.py:178 _init_group"
STEP = "train.py:90 main"
WEIGHT = frames("lib/python3.12/site-packages/torch/nn/modules/linear.py:106 __init__", "model.py:12 __init__", "train.py:70 main")
STATE = frames(ADAM, "lib/python3.12/site-packages/torch/optim/adam.py:238 step", "train.py:45 step", STEP)
GRAD = frames("lib/python3.12/site-packages/torch/autograd/graph.py:830 _engine_run_backward", "train.py:43 step", STEP)
LAYER = frames(LINEAR, CALL, "model.py:31 forward", CALL, "train.py:41 step", STEP)
LOSS = frames("train.py:42 step", STEP)
KEEP = frames("train.py:19 remember", "train.py:47 step", STEP)


def train(a: Allocator, steps: int, after=lambda step: None, layers: int = 6, built: bool = True, end_in_forward: bool = False, size: int = 40 * KIB):
    """Weights in a loop of one line, optimizer state in the first step, a running loss, gradients given back."""
    if built:
        for _ in range(layers):
            a.malloc(64 * KIB, WEIGHT)
    running = None
    for step in range(steps):
        acts = [a.malloc(size + 512 * n, LAYER) for n in range(layers)]
        if end_in_forward and step == steps - 1:
            return
        loss = a.malloc(4, LOSS)
        if running is not None:
            a.free(running)
        running = loss
        grads = [a.malloc(64 * KIB, GRAD) for _ in range(layers)]
        for act in reversed(acts):
            a.free(act)
        if step == 0 and built:
            for _ in range(2 * layers):
                a.malloc(64 * KIB, STATE)
        for grad in grads:
            a.free(grad)
        after(step)
