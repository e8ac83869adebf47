"""``%%memprof_cuda``: CUDA C in a cell, compiled, launched once over the arrays named on the magic's line, counted, explained.

    %%memprof_cuda scale(x, y, n) --block 256
    extern "C" __global__ void scale(const float* x, float* y, int n) { … }

Scalars become what the kernel's parameters say. The grid covers the first array unless it is given. Without a GPU nothing runs: the access model says
what each line that it can follow would cost.
"""

from __future__ import annotations

import ast
import re
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nbmemprof import _optional, flags
from nbmemprof.errors import FlagError, NbmemprofError, NotRecording

if TYPE_CHECKING:
    from nbmemprof.gpu.counters import Counted

__all__ = ["FLAGS", "HELP", "launch", "load", "modelled", "run", "unload"]

NAME = "memprof_cuda"
PROG = f"%%{NAME}"
HELP = "Compile the CUDA C of this cell, launch one of its kernels once, and say what it does with memory."
FLAGS = [
    flags.Flag("--grid", "blocks, an expression: 1024 or (64, 64); covers the first array unless given", metavar="GRID"),
    flags.Flag("--block", "threads of a block", default="256", metavar="BLOCK"),
    flags.Flag("--shared", "bytes of dynamic shared memory", default="0", metavar="BYTES"),
    flags.Flag("--lines", "count by ncu in a child process, on copies of the arrays: slower, and every source line is told", action="store_true", default=False),
    flags.Flag("--out", "bind the frame of the counters to this name", type=flags.identifier, metavar="NAME"),
]
# C type of a parameter -> NumPy's; pointers are checked against the same
_TYPES = {
    "float": np.float32, "double": np.float64, "int": np.int32, "unsigned": np.uint32, "unsigned int": np.uint32, "long long": np.int64, "unsigned long long": np.uint64,
    "long": np.int64, "size_t": np.uint64, "short": np.int16, "char": np.int8, "unsigned char": np.uint8, "bool": np.bool_, "half": np.float16, "__half": np.float16,
}  # fmt: skip


def load(shell: Any) -> None:
    """Register the magic in a shell."""

    def magic(line: str, cell: str) -> Counted | None:
        return run(line, cell, shell.user_ns)

    magic.__doc__ = f"{HELP}\n\n    {PROG} KERNEL(ARGUMENTS) {' '.join(f'[{flag.usage()}]' for flag in FLAGS)}\n\n{flags.describe(FLAGS)}\n{__doc__}"
    shell.register_magic_function(magic, "cell", NAME)


def unload(shell: Any) -> None:
    """Take the magic away."""
    shell.magics_manager.magics["cell"].pop(NAME, None)


def run(line: str, cell: str, names: dict[str, Any]) -> Counted | None:
    """What the magic does.

    Parameters
    ----------
    line, cell
        The magic's line and the code below it.
    names
        The notebook's variables, in which the line's expressions are evaluated; ``--out`` binds its name there.

    Returns
    -------
    The counters; None where there is no GPU, and the model's answer was printed.
    """
    from nbmemprof.gpu import _context

    call, args = _parsed(line)
    name, shape = call.func.id, _numbers(args.block, names, "--block")  # type: ignore[attr-defined]
    _parameters(cell, name)
    try:
        _context.current()
    except NotRecording as error:
        _say(f"{error}\n{modelled(cell, name, shape)}")
        return None
    values = [_evaluated(ast.unparse(argument), names, f"the argument {ast.unparse(argument)}") for argument in call.args]
    grid = _numbers(args.grid, names, "--grid") if args.grid else None
    counted = launch(cell, name, values, grid=grid, block=shape, shared_bytes=_numbers(args.shared, names, "--shared")[0], lines=args.lines)
    if args.out:
        names[args.out] = counted
    return counted


def launch(source: str, name: str, values: Sequence[Any], *, grid: tuple[int, ...] | None, block: tuple[int, ...], shared_bytes: int = 0, lines: bool = False) -> Counted:
    """Compile, launch once, count.

    Raises
    ------
    NbmemprofError
        The code doesn't compile (the compiler's words), has no such kernel, or an argument doesn't fit its parameter.
    """
    from nbmemprof.gpu.counters import counters

    fitted = _fitted(source, name, values)
    covered = grid or (-(-max((value.size for value in fitted if hasattr(value, "__cuda_array_interface__")), default=block[0]) // block[0]),)
    if lines:
        return counters(_launched, source, name, covered, block, shared_bytes, tuple(fitted), how="ncu")
    function = _compiled(source, name)
    return counters(lambda: function(covered, block, tuple(fitted), shared_mem=shared_bytes))


def _launched(source: str, name: str, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, values: tuple[Any, ...]) -> None:
    """The launch as a child process does it."""
    _compiled(source, name)(grid, block, values, shared_mem=shared_bytes)


def _compiled(source: str, name: str) -> Any:
    cupy = _optional.require("cupy", feature=PROG)
    try:
        return cupy.RawModule(code=source, options=("-std=c++17", "-lineinfo")).get_function(name)
    except cupy.cuda.compiler.CompileException as error:
        raise NbmemprofError(f"Nothing was launched: mend the CUDA C of this cell, which doesn't compile:\n{error}") from error


# ---------------------------------------------------------------------- the line
def _parsed(line: str) -> tuple[ast.Call, Namespace]:
    match = re.match(r"\s*\w+\s*\(", line)
    end, depth = match.end() if match else 0, 1
    while match and end < len(line) and depth:
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        end += 1
    try:
        call = ast.parse(line[:end].strip(), mode="eval").body if match else None
    except SyntaxError:
        call = None
    if not isinstance(call, ast.Call) or call.keywords:
        raise FlagError(f"{PROG}: {line.strip()!r} doesn't begin with a call of the kernel. Write it like: {PROG} scale(x, y, n) --block 256")
    return call, flags.parse(line[end:], FLAGS, prog=PROG)


def _evaluated(text: str, names: dict[str, Any], what: str) -> Any:
    try:
        return eval(compile(text, PROG, "eval"), names)  # noqa: S307 - the user's own line
    except Exception as error:
        raise FlagError(f"{PROG}: {what} can't be evaluated ({type(error).__name__}: {error}). Nothing was launched: write it with variables of this notebook.") from error


def _numbers(text: str, names: dict[str, Any], what: str) -> tuple[int, ...]:
    value = _evaluated(text, names, what)
    made = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not 1 <= len(made) <= 3 or not all(isinstance(part, (int, np.integer)) and part >= 0 for part in made):
        raise FlagError(f"{PROG}: {what} can't be {value!r}. It is a whole number, or up to three of them: (64, 64).")
    return tuple(int(part) for part in made)


# ---------------------------------------------------------------------- arguments
def _parameters(source: str, name: str) -> list[tuple[str, str, bool]]:
    """(C type, name, pointer) of each parameter of a kernel."""
    match = re.search(rf"__global__[^;{{]*?\b{name}\s*\(([^)]*)\)", source, re.DOTALL)
    if match is None:
        there = re.findall(r"__global__[^;{]*?\b(\w+)\s*\([^)]*\)\s*\{", source)
        raise NbmemprofError(f"There is no kernel {name!r} in this cell.{flags.near(name, there)} Kernels there: {', '.join(there) or 'none'}.")
    made = []
    for part in filter(None, (re.sub(r"\b(?:const|__restrict__|volatile)\b", " ", text).strip() for text in match.group(1).split(","))):
        kind, _, word = part.replace("*", " * ").rpartition(" ")
        made.append((" ".join(kind.replace("*", " ").split()), word, "*" in part))
    return made


def _fitted(source: str, name: str, values: Sequence[Any]) -> list[Any]:
    """Arguments as the kernel's parameters want them."""
    parameters = _parameters(source, name)
    if len(parameters) != len(values):
        raise NbmemprofError(f"{name} has {len(parameters)} parameters ({', '.join(word for _, word, _ in parameters)}), and {len(values)} arguments were given. Give one for each.")
    return [_array(value, kind, word) if pointer else _scalar(value, kind, word) for value, (kind, word, pointer) in zip(values, parameters, strict=True)]


def _array(value: Any, kind: str, word: str) -> Any:
    if not hasattr(value, "__cuda_array_interface__"):
        raise NbmemprofError(f"{word} is a {type(value).__name__} that does not lie on the GPU. Pass a CuPy array, or a torch tensor with .cuda().")
    array = _optional.require("cupy", feature=PROG).asarray(value)
    wanted = _TYPES.get(kind)
    if wanted is not None and array.dtype != wanted:
        raise NbmemprofError(f"{word} is an array of {array.dtype}, and the kernel wants {kind}*. Pass {word}.astype({np.dtype(wanted).name!r}), or change the kernel.")
    return array


def _scalar(value: Any, kind: str, word: str) -> Any:
    wanted = _TYPES.get(kind)
    try:
        return value if wanted is None else wanted(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise NbmemprofError(f"{word} can't be {value!r}: the kernel wants {kind} ({error}). Pass a number that fits it.") from error


# ---------------------------------------------------------------------- without a GPU
def modelled(source: str, name: str, block: tuple[int, ...]) -> str:
    """What the access model says of a kernel's lines, as text."""
    from nbmemprof.gpu import _strides

    shape = (*block, 1, 1)[:3]
    found = _strides.modelled(source, name, (shape[0], shape[1], shape[2]))
    if not found:
        return "The access model follows no line of this kernel: an index is more than arithmetic on threads, blocks and parameters."
    said = [f"line {row.line}: {row.operation} of {row.array}, stride {row.stride}: {row.units} {row.unit} a warp where {row.ideal} would do" for row in found]
    return "\n".join(["Modelled, not measured:", *said])


def _say(text: str) -> None:
    print(text)  # noqa: T201 - what a magic says
