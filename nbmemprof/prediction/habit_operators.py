"""Operators that notebooks call and that have no kernel for fakes: packed sequences, a fused optimizer, flex attention; and a word on the others."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from nbmemprof.prediction.patches import when_imported

__all__ = ["install", "unknown_operator"]

_FLEX = "flex_attention was taken as its compiled kernel: the output, its log-sum-exp, and the gradients"
_FLEX_PLAIN = "flex_attention without torch.compile: two matrices of scores in float32 were counted"


def install(torch: Any, session: Any) -> None:
    """Give the recorder the rules, and torch the functions, for the session's time."""
    aten, rules = torch.ops.aten, session.recorder.rules
    shadows = session.recorder.shadows

    def pack(recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
        source, lengths, batch_first = args
        steps, batch = (source.shape[1], source.shape[0]) if batch_first else (source.shape[0], source.shape[1])
        counts = _lengths(session, lengths, steps, batch)
        with recorder:
            data = source.new_empty((sum(counts), *source.shape[2:]))
            sizes = torch.empty(max(counts), dtype=torch.int64, device="cpu")
        with shadows._outside():
            real = torch.tensor([sum(count > step for count in counts) for step in range(max(counts))], dtype=torch.int64)
        shadows.put(sizes, real)
        return data, sizes

    def pad(data: Any, batch_sizes: Any, batch_first: Any, padding: Any, total: Any) -> Any:
        sizes = [int(n) for n in batch_sizes.tolist()]
        out = data.new_full((total if total > 0 else len(sizes), sizes[0], *data.shape[1:]), padding)
        step = at = 0
        for batch, run in groupby(sizes):
            count = len(list(run))
            out[step : step + count, :batch].copy_(data[at : at + count * batch].view(count, batch, *data.shape[1:]))
            step, at = step + count, at + count * batch
        lengths = torch.tensor([sum(batch > row for batch in sizes) for row in range(sizes[0])], dtype=torch.int64, device="cpu")
        return (out.transpose(0, 1) if batch_first else out), lengths

    rules.before[aten._pack_padded_sequence.default] = pack
    rules.before[aten.allclose.default] = lambda _recorder, _func, args, kwargs: _allclose(session, args, kwargs)
    for name in ("_fused_sgd_", "_fused_adagrad_"):
        for overload in getattr(aten, name).overloads() if hasattr(aten, name) else ():
            rules.before[getattr(getattr(aten, name), overload)] = lambda *_: None  # written in place
    library = session.recorder.habit_library = torch.library.Library("aten", "IMPL")
    library.impl("_pad_packed_sequence", pad, "AutogradCUDA")
    session._stack.callback(library._destroy)
    when_imported("torch.nn.attention.flex_attention", session.changes, lambda module: session.changes.put(module, "flex_attention_hop", _flex(torch, session)))


def _lengths(session: Any, lengths: Any, steps: int, batch: int) -> list[int]:
    known = session.recorder.shadows.of(lengths)
    if known is None:
        session.record.assume("unknown lengths of sequences were taken as the longest")
        return [steps] * batch
    with session.recorder.shadows._outside():
        return [int(n) for n in known.tolist()]


def _allclose(session: Any, args: Any, kwargs: Any) -> bool:
    shadows = session.recorder.shadows
    one, other = shadows.of(args[0]), shadows.of(args[1])
    if one is None or other is None:
        session.record.assume("an unknown comparison was taken as equal")
        return True
    with shadows._outside():
        return bool(one.allclose(other, *args[2:], **kwargs))


# ---------------------------------------------------------------------- flex attention
def _flex(torch: Any, session: Any) -> Any:
    """What the compiled kernel asks for."""

    class Flex(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            out = query.new_empty((*query.shape[:3], value.shape[-1]))
            sums = query.new_empty(query.shape[:3], dtype=torch.float32)
            ctx.save_for_backward(query, key, value, out, sums)
            ctx.mark_non_differentiable(sums)
            return out, sums

        @staticmethod
        def backward(ctx: Any, grad: Any, _sums: Any) -> Any:
            query, key, value, _out, sums = ctx.saved_tensors
            delta = torch.empty_like(sums)
            made = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
            del delta, grad
            return made

    def flex(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> Any:
        session.record.assume(_FLEX if session.compiled else _FLEX_PLAIN)
        if not session.compiled:
            scores = [query.new_empty((*query.shape[:3], key.shape[2]), dtype=torch.float32) for _ in range(2)]
            del scores
        out, sums = Flex.apply(query, key, value)
        return out, sums, sums

    return flex


# ---------------------------------------------------------------------- a word on the others
def unknown_operator(error: BaseException) -> str | None:
    """Say which operator an error is about that no fake kernel exists for; None for other errors."""
    named = type(error).__name__ == "UnsupportedOperatorException"  # of torch._subclasses: an operator of the user's own
    if not isinstance(error, (NotImplementedError, RuntimeError)) or not (named or any(words in str(error) for words in ("Could not run 'aten::", "no fake impl or Meta kernel", "Dynamic", "aten.", "HigherOrderOperator"))):
        return None
    trace, found = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "__torch_dispatch__":
            found = trace.tb_frame.f_locals.get("func", found)
        trace = trace.tb_next
    name = getattr(found, "name", None)
    if name is None:
        return None
    return f"memprof: {name()} has no kernel for fake tensors here, so what follows it is not predicted. Predict the part before it, or put a tensor of the result's shape in its place."
