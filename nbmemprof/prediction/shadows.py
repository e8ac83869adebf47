"""Values beside fake tensors: small integers, booleans and scalars are kept as real CPU tensors, so that code that looks at values runs on.

A shadow is made by the same operator on the shadows of its inputs. Where one input's value is not known the result's is not
either; what is then asked of it is answered by a convention and counted as an assumption.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Shadows"]

HANGS = "sizes hang on values that are a guess (an unknown order, largest elements)"
LIMIT = 4 << 20  # elements of an integer or boolean tensor
VIEWED = 64 << 20  # elements of a view of such: it takes no memory of its own
SMALL = 16  # elements of a floating tensor
_NAME = "_nbmemprof_value"
_GUESS = "_nbmemprof_guess"


class Shadows:
    """Known values of a fake run."""

    def __init__(self, torch: Any, record: Any, nonzero_fraction: float = 1.0) -> None:
        self.torch, self.record, self.fraction = torch, record, nonzero_fraction
        self.tensor = torch.Tensor
        self.fake = torch._subclasses.fake_tensor.FakeTensor
        aten = torch.ops.aten
        self._scalar = aten._local_scalar_dense.default
        self._tables = _conventions(torch)
        self._guess = False  # whether the shadows that were looked at last are guesses
        self._linspace = aten.linspace.default
        # masks are made with these: their values are kept in floating point too
        self._masks = frozenset((
            aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.masked_fill.Scalar, aten.masked_fill_.Scalar, aten.where.self, aten.where.ScalarSelf, aten._to_copy.default,
            aten.mul.Tensor, aten.sub.Tensor, aten.rsub.Scalar, aten.add.Tensor, aten.linspace.default, aten.index_put_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default,
        ))  # fmt: skip
        self._outside = torch.utils._python_dispatch._disable_current_modes
        self._data = {
            aten.nonzero.default: self._nonzero, aten.unique_dim.default: self._unique, aten._unique2.default: self._unique, aten.unique_consecutive.default: self._unique,
            aten.masked_select.default: self._masked_select, aten.repeat_interleave.Tensor: self._repeat, aten.equal.default: self._equal, aten.bincount.default: self._bincount,
            aten._local_scalar_dense.default: self._item, aten.is_nonzero.default: self._item,
        }  # fmt: skip

    # ------------------------------------------------------------------ reading
    def of(self, value: Any) -> Any:
        """The real tensor behind a fake one; None where its value is not known."""
        if isinstance(value, self.fake):
            found = value.__dict__.get(_NAME)
            if found is None and value.constant is not None:
                return value.constant
            return found
        return value if value.device.type == "cpu" and not value.is_sparse else None

    def put(self, tensor: Any, value: Any, *, guess: bool = False) -> None:
        """Remember a value; a guess makes guesses of all that is computed from it."""
        if isinstance(tensor, self.fake):
            tensor.__dict__[_NAME] = value
            if guess:
                setattr(value, _GUESS, True)

    # ------------------------------------------------------------------ operators whose result hangs on values
    def answer(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        """Answer an operator that fakes can't; (False, None) for all others."""
        ask = self._data.get(func)
        if ask is None:
            return False, None
        return ask(func, args, kwargs)

    def _item(self, _func: Any, args: Any, _kwargs: Any) -> tuple[bool, Any]:
        tensor = args[0]
        value = self.of(tensor)
        if value is not None:
            with self._outside():
                return True, value.item()
        if tensor.dtype == self.torch.bool:
            self.record.assume("an unknown truth value was taken as False")
            return True, False
        if tensor.is_floating_point():
            self.record.assume("an unknown number was taken as 1.0")
            return True, 1.0
        self.record.assume("an unknown integer was taken as 1")
        return True, 1

    def _equal(self, func: Any, args: Any, _kwargs: Any) -> tuple[bool, Any]:
        one, other = self.of(args[0]), self.of(args[1])
        if one is not None and other is not None:
            with self._outside():
                return True, func(one, other)
        self.record.assume("an unknown comparison was taken as equal")
        return True, True

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operator on the shadows; None where one is missing."""
        made = self._shadow_args(args, kwargs)
        if made is None:
            return None
        with self._outside():
            return func(*made[0], **made[1])

    def _like(self, device: Any, value: Any) -> Any:
        """A fake tensor on a device for a known value."""
        fake = self.torch.empty(value.shape, dtype=value.dtype, device=device)
        self.put(fake, value)
        return fake

    def _nonzero(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        tensor = args[0]
        real = self._real(func, args, kwargs)
        if real is None:
            rows = int(tensor.numel() * self.fraction)
            self.record.assume(f"an unknown mask was taken to select {self.fraction:.0%} of its elements")
            real = self._some_indices(tensor.shape, rows)
        elif self._guess:
            self.record.assume(HANGS)
        return True, self._like(tensor.device, real)

    def _some_indices(self, shape: Any, rows: int) -> Any:
        with self._outside():
            flat = self.torch.arange(rows)
            return self.torch.stack(self.torch.unravel_index(flat, tuple(shape)), dim=1) if len(shape) else self.torch.zeros((rows, 0), dtype=self.torch.long)

    def _masked_select(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        tensor, mask = args[0], args[1]
        known = self.of(mask)
        with self._outside():
            shape = self.torch.broadcast_shapes(tensor.shape, mask.shape)
            count = None if known is None else int(known.expand(shape).sum())
        if count is None:
            count = int(_product(shape) * self.fraction)
            self.record.assume(f"an unknown mask was taken to select {self.fraction:.0%} of its elements")
        out = self.torch.empty((count,), dtype=tensor.dtype, device=tensor.device)
        real = self._real(func, args, kwargs) if known is not None else None
        if real is not None:
            self.put(out, real)
        return True, out

    def _unique(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        real = self._real(func, args, kwargs)
        if real is None:
            self.record.assume("unknown elements were taken to be all different")
            with self._outside():
                real = func(self.torch.arange(args[0].numel()).reshape(args[0].shape), *args[1:], **kwargs)
            real = (real[0].to(args[0].dtype), *real[1:])
        return True, tuple(self._like(args[0].device, value) for value in real)

    def _repeat(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        real = self._real(func, args, kwargs)
        if real is None:
            size = kwargs.get("output_size")
            if size is None:
                self.record.assume("unknown repeats were taken as 1")
                size = args[0].numel()
            real = self.torch.arange(size, dtype=args[0].dtype, device="meta")
            out = self.torch.empty((size,), dtype=args[0].dtype, device=args[0].device)
            return True, out
        return True, self._like(args[0].device, real)

    def _bincount(self, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
        real = self._real(func, args, kwargs)
        if real is None:
            self.record.assume("an unknown bincount was taken to have its minimal length")
            with self._outside():
                real = self.torch.zeros(max(1, kwargs.get("minlength", args[2] if len(args) > 2 else 0)), dtype=self.torch.long)
        return True, self._like(args[0].device, real)

    # ------------------------------------------------------------------ all other operators
    def follow_view(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """A view's value is the same view of the value."""
        source = args[0] if args else None
        if (isinstance(source, self.fake) and _NAME in source.__dict__) or (isinstance(source, self.tensor) and not isinstance(source, self.fake) and source.device.type == "cpu"):
            self.follow(func, args, kwargs, out, view=True)

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any, *, view: bool = False) -> None:
        """Compute the values of an operator's outputs where they are small, or masks or views of such, and its inputs known."""
        if isinstance(out, self.tensor):
            mask = view or (func in self._masks and (self._some_known(args) or func is self._linspace))
            if not self._wanted(out) and not (mask and out.numel() <= (VIEWED if view else LIMIT)):
                return
        elif isinstance(out, (tuple, list)):
            if not any(isinstance(item, self.tensor) and self._wanted(item) for item in out):
                return
        elif not (out is None and args and self._first_known(args[0])):
            return
        written = func._schema.is_mutable
        made = self._shadow_args(args, kwargs)
        if made is None:
            if not written:
                convention = self._tables.get(func)
                if convention is not None:
                    convention(self, func, args, kwargs, out)
            return
        try:
            with self._outside():
                real = func(*made[0], **made[1])
        except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
            return
        if written and (out is None or out is args[0]):
            return  # the shadow was written in place
        self._keep(out, real, view or func in self._masks)

    def _first_known(self, value: Any) -> bool:
        """Whether an operator that returns nothing writes to something known: lists are known or unknown as a whole."""
        if isinstance(value, (list, tuple)):
            value = value[0] if value else None
        return isinstance(value, self.tensor) and self._wanted(value) and self.of(value) is not None

    def _some_known(self, args: Any) -> bool:
        return any(isinstance(value, self.tensor) and self.of(value) is not None for value in args)

    def _keep(self, out: Any, real: Any, mask: bool = False) -> None:
        if isinstance(out, self.tensor):
            if (mask or self._wanted(out)) and isinstance(real, self.tensor) and real.shape == out.shape:
                self.put(out, real, guess=self._guess)
        elif isinstance(out, (tuple, list)) and isinstance(real, (tuple, list)):
            for one, other in zip(out, real, strict=False):
                self._keep(one, other)

    def _wanted(self, tensor: Any) -> bool:
        count = tensor.numel()
        if count > LIMIT:
            return False
        return count <= SMALL or not (tensor.is_floating_point() or tensor.is_complex())

    def _shadow_args(self, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]] | None:
        positional: list[Any] = []
        self._guess = False
        for value in args:
            made = self._shadow(value)
            if made is _UNKNOWN:
                return None
            positional.append(made)
        named: dict[str, Any] = {}
        for key, value in kwargs.items():
            if key == "device":
                named[key] = "cpu"
                continue
            if key == "pin_memory":
                continue
            made = self._shadow(value)
            if made is _UNKNOWN:
                return None
            named[key] = made
        return positional, named

    def _shadow(self, value: Any) -> Any:
        if isinstance(value, self.tensor):
            known = self.of(value)
            if known is None:
                return _UNKNOWN
            self._guess = self._guess or hasattr(known, _GUESS)
            return known
        if isinstance(value, (list, tuple)):
            made = [self._shadow(item) for item in value]
            return _UNKNOWN if any(item is _UNKNOWN for item in made) else made
        if isinstance(value, self.torch.device):
            return self.torch.device("cpu")
        return value


_UNKNOWN = object()


def _product(shape: Any) -> int:
    total = 1
    for size in shape:
        total *= int(size)
    return total


def _conventions(torch: Any) -> dict[Any, Any]:
    """What indices are taken to be where values are not known: zeros for the largest, 0, 1, 2, … for an order."""
    aten = torch.ops.aten

    def zeros(shadows: Shadows, _func: Any, _args: Any, _kwargs: Any, out: Any) -> None:
        item = out if isinstance(out, torch.Tensor) else out[1]
        with shadows._outside():
            shadows.put(item, torch.zeros(item.shape, dtype=item.dtype), guess=True)
        shadows.record.assume("unknown largest elements were taken to be the first")

    def counting(shadows: Shadows, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        indices = out[1]
        names = [argument.name for argument in func._schema.arguments]
        dim = (dict(zip(names, args, strict=False)) | kwargs).get("dim", -1)
        size = args[0].shape[dim] if args[0].dim() else 1
        with shadows._outside():
            shadows.put(indices, (torch.arange(indices.numel()) % max(1, size)).reshape(indices.shape), guess=True)
        shadows.record.assume("an unknown order was taken as 0, 1, 2, … (routing in balance)")

    return {
        aten.argmax.default: zeros, aten.argmin.default: zeros, aten.multinomial.default: zeros, aten.max.dim: zeros, aten.min.dim: zeros,
        aten.topk.default: counting, aten.sort.default: counting, aten.sort.stable: counting,
    }  # fmt: skip
