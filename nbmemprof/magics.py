"""``%%memprof`` and ``%memprof``: the only module that knows IPython's shell.

A profiled cell runs as a plain cell: an input transformer turns the magic's line into a comment (or drops
it where another cell magic follows), recording begins in ``pre_run_cell`` and ends in ``post_run_cell``.
The registered magic answers ``?`` and runs cells that come as text (``run_cell_magic``).
"""

from __future__ import annotations

import ast
import importlib
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from IPython.core.displayhook import DisplayHook
from IPython.core.error import InputRejected
from IPython.utils.text import DollarFormatter

from nbmemprof import _line, errors, flags, holding, sources
from nbmemprof._line import NAME
from nbmemprof.capture import Capture
from nbmemprof.errors import NotRecording
from nbmemprof.prediction.routing import Router, Work
from nbmemprof.recording import Recording, record

__all__ = ["Magics", "last", "load", "of", "present", "unload"]

_ATTRIBUTE = "_nbmemprof"
_OWN = {flag.dest for flag in flags.BASE} - {"source", "stacks"}  # for us, not for the source


class FlagError(errors.FlagError, InputRejected):  # type: ignore[misc]  # IPython's names are untyped
    """The magic's line could not be understood; raised in place of running the cell."""


@dataclass(eq=False)
class _Cell:
    """A cell between ``pre_run_cell`` and ``post_run_cell``; its window where it is recorded."""

    info: Any
    number: int | None = None
    thread: int = field(default_factory=threading.get_ident)
    args: Namespace | None = None
    window: Recording | None = None
    below: bool = False  # the magic stands below another cell magic, which may run the rest or not
    seen: bool = False  # it did, and not as a cell of its own
    refusal: _Refusal | None = None
    work: Work | None = None  # what runs elsewhere in its place
    names: dict[int, str] = field(default_factory=dict)  # which variable had which memory when it began
    later: list[tuple[Capture, Namespace]] = field(default_factory=list)


class _Refusal(ast.NodeTransformer):
    """Stands among the shell's AST transformers for one cell and stops it."""

    def __init__(self, error: errors.FlagError) -> None:
        self.error = error

    def visit(self, node: ast.AST) -> Any:
        raise FlagError(str(self.error))


class Magics:
    """The magics of one shell: its hooks, the cells under way, and whether every cell is recorded."""

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.auto = False
        self.flags = flags.cell_flags()
        self.router = Router(shell, self._hush)
        self._cells: list[_Cell] = []
        self._hooks: dict[str, Callable[[Any], None]] = {"pre_run_cell": self.before, "post_run_cell": self.after}
        self._displaced: dict[str, Any] = {}

    # ------------------------------------------------------------------ coming and going
    def register(self) -> None:
        """Put the hooks and the magics in place."""

        def cell_magic(line: str, cell: str) -> Any:
            return self.run_text(line, cell)

        def line_magic(line: str) -> Any:
            return self.run_verb(line)

        cell_magic.__doc__, line_magic.__doc__ = flags.cell_help(), flags.line_help()
        for kind, function in (("cell", cell_magic), ("line", line_magic)):
            self._displaced[kind] = self.shell.magics_manager.magics[kind].get(NAME)
            self.shell.register_magic_function(function, kind, NAME)
        for event, hook in self._hooks.items():
            self.shell.events.register(event, hook)
        self.shell.input_transformers_cleanup.append(self.transform)

    def unregister(self) -> None:
        """Take all of it away; recordings under way end unseen."""
        for event, hook in self._hooks.items():
            if hook in self.shell.events.callbacks[event]:
                self.shell.events.unregister(event, hook)
        if self.transform in self.shell.input_transformers_cleanup:
            self.shell.input_transformers_cleanup.remove(self.transform)
        for kind, former in self._displaced.items():
            magics = self.shell.magics_manager.magics[kind]
            magics.pop(NAME, None)
            if former is not None:
                magics[NAME] = former
        user_magics = getattr(self.shell.magics_manager, "user_magics", None)
        if user_magics is not None:
            user_magics.__dict__.pop(NAME, None)
        for cell in self._cells:
            self._drop(cell)
        self._cells.clear()
        self.router.end()
        sources.leave()

    def _hush(self) -> None:
        """In a forked copy of the shell: cells run there without us."""
        for event, hook in self._hooks.items():
            self.shell.events.unregister(event, hook)
        self.shell.ast_transformers[:] = [one for one in self.shell.ast_transformers if one not in [cell.work and cell.work.transformer for cell in self._cells]]
        self._cells.clear()

    # ------------------------------------------------------------------ the cell's life
    def transform(self, lines: list[str]) -> list[str]:
        """Make the magic's line a comment, so that line numbers stay; drop it above another cell magic."""
        if not _line.first(lines) or _runs_silently():
            return lines
        cell = self._top()
        if cell is not None and cell.below:
            cell.seen = True
        return _line.as_comment(lines)

    def before(self, info: Any) -> None:
        """``pre_run_cell``: open the window, where the cell asks for one."""
        outer = self._top()
        cell = _Cell(info, outer.number if outer is not None else self.shell.execution_count - bool(info.store_history))
        self._cells.append(cell)
        line, cell.below = _line.find(info.raw_cell)
        if line is not None and outer is not None and outer.below:
            self._drop(outer)
        try:
            if line is not None:
                cell.args = flags.parse(self._expand(line), self.flags)
            cell.work = self.router.route(info.raw_cell, _line.without(info.raw_cell), cell.args, cell.number) if outer is None or line is not None else None
            if cell.work is not None:
                self.shell.ast_transformers.append(cell.work.transformer)
            elif cell.args is not None:
                cell.names = holding.names_now(self.shell.user_ns, self.shell)
                cell.window = self._record(cell.args, cell.number)
            elif self.auto and outer is None:
                cell.window = self._record(None, cell.number)
            if cell.window is not None:
                cell.window.start()
        except errors.NbmemprofError as error:
            self._drop(cell)
            if not cell.below:
                cell.refusal = _Refusal(errors.FlagError(str(error)))
                self.shell.ast_transformers.append(cell.refusal)

    def after(self, result: Any) -> None:
        """``post_run_cell``: close the window; the report comes after the cell's output and its error."""
        cell = self._take(result)
        if cell is None:
            return
        window, cell.window = cell.window, None
        try:
            if cell.work is not None:
                self._take_over(cell.work, cell.args)
            else:
                self.router.ran(cell.info.raw_cell, getattr(result, "error_in_exec", None))
            if window is not None and (getattr(result, "error_before_exec", None) is not None or (cell.below and not cell.seen)):
                window.discard()
            elif window is not None:
                capture = window.stop()
                if cell.args is not None:
                    capture.meta.update(holding.told(self.shell, capture, cell.names, getattr(result, "error_in_exec", None)))
                    self.finish(capture, cell.args)
                else:
                    self._tell(capture)
        finally:
            self._drop(cell)
            for capture, args in cell.later:
                self.finish(capture, args)

    def _take_over(self, work: Work, args: Namespace | None) -> None:
        """Bind and show what a cell that ran elsewhere brought home."""
        capture, work.capture = work.capture, None
        if capture is None:
            return
        if args is not None and not work.shown:
            self.finish(capture, args)
            return
        self.shell.user_ns["_memprof"] = capture
        if work.other:
            self.shell.user_ns[work.other] = capture

    def finish(self, capture: Capture, args: Namespace) -> None:
        """Bind, save and show a capture as its line says."""
        self.shell.user_ns["_memprof"] = capture
        if args.out:
            self.shell.user_ns[args.out] = capture
        if args.save:
            from nbmemprof.verbs import save

            try:
                _say(save.write(capture, args.save))
            except (OSError, errors.NbmemprofError) as error:
                _say(f"memprof: not saved to {args.save}: {error}. The capture is in _memprof; try %memprof save FILE.", sys.stderr)
        if args.history:
            from nbmemprof import history

            try:
                _say(f"added to the history: {history.keep(capture, args.history)}")
            except (OSError, errors.NbmemprofError) as error:
                _say(f"memprof: not added to the history: {error}. The capture is in _memprof.", sys.stderr)
        if not args.quiet:
            present(capture, args.view)

    def _record(self, args: Namespace | None, number: int | None) -> Recording:
        options = {"source": "auto"} if args is None else {name: value for name, value in vars(args).items() if name not in _OWN}
        return record(cell=number, **options)

    def _tell(self, capture: Capture) -> None:
        from nbmemprof.verbs import auto

        line = auto.line(capture)
        if line and self.auto:
            self.shell.user_ns["_memprof"] = capture
            _say(line)

    def _expand(self, line: str) -> str:
        """Fill in ``{name}`` and ``$name`` as IPython does for its magics."""
        if "{" not in line and "$" not in line:
            return line
        try:
            return str(DollarFormatter().vformat(line, args=(), kwargs=self.shell.user_ns))
        except Exception:
            return line  # as IPython's own var_expand: text that can't be filled in stays

    def _top(self) -> _Cell | None:
        thread = threading.get_ident()
        return next((cell for cell in reversed(self._cells) if cell.thread == thread), None)

    def _take(self, result: Any) -> _Cell | None:
        """The cell that ended here. Cells above it in this thread have lost their own end and go with it."""
        mine = [cell for cell in self._cells if cell.thread == threading.get_ident()]
        info = getattr(result, "info", None)
        if info is not None and not (info.raw_cell or "").strip():
            return None  # the shell doesn't announce empty cells
        found = next((c for c in reversed(mine) if info is None or c.info is info), None)
        if found is None and info is not None:  # the shell makes a new info where the runner itself failed
            found = next((c for c in reversed(mine) if c.info.raw_cell == info.raw_cell), None)
        if found is not None:
            for cell in mine[mine.index(found) :]:
                self._cells.remove(cell)
                if cell is not found:
                    self._drop(cell)
        return found

    def _drop(self, cell: _Cell) -> None:
        window, cell.window = cell.window, None
        if window is not None:
            window.discard()
        refusal, cell.refusal = cell.refusal, None
        for other in (refusal, cell.work and cell.work.transformer):
            if other is not None and other in self.shell.ast_transformers:
                self.shell.ast_transformers.remove(other)

    # ------------------------------------------------------------------ called as magics
    def run_text(self, line: str, cell: str) -> Any:
        """Run a cell that came as text, as ``run_cell_magic`` hands it over; errors are raised to the caller."""
        args = flags.parse(line, self.flags)
        outer = self._top()
        if args.predict:
            return self._run_elsewhere(cell, args, outer)
        window = self._record(args, outer.number if outer is not None else None)
        with window:
            failed = True
            try:
                value = self._run(cell)
                failed = False
            finally:
                capture = window.stop()
                if failed and outer is not None:
                    outer.later.append((capture, args))  # after the traceback, which is the outer cell's
                else:
                    self.finish(capture, args)
        return value

    def _run_elsewhere(self, text: str, args: Namespace, outer: _Cell | None) -> None:
        capture, hearing = self.router.predict(text, args, outer.number if outer is not None else None)
        if capture is not None and outer is not None:
            outer.later.append((capture, args))
        elif capture is not None:
            self.finish(capture, args)
        hearing.raise_error()

    def _run(self, text: str) -> Any:
        shell = self.shell
        transformed = shell.transform_cell(text)
        name = shell.compile.cache(transformed, shell.execution_count, raw_code=text)
        tree = shell.transform_ast(shell.compile.ast_parse(transformed, filename=name))
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(shell.compile(tree, name, "exec"), shell.user_ns)  # noqa: S102 - the user's own cell
        if last is None:
            return None
        value = eval(shell.compile(ast.Expression(last.value), name, "eval"), shell.user_ns)  # noqa: S307 - as above
        return None if DisplayHook.semicolon_at_end_of_expression(text) else value

    def run_verb(self, line: str) -> Any:
        """``%memprof VERB ...``; what a person got wrong is one line, as with IPython's own magics."""
        try:
            return self._verb(line)
        except errors.NbmemprofError as error:
            if not hasattr(error, "_render_traceback_"):
                error.__dict__["_render_traceback_"] = partial(list, [f"{type(error).__name__}: {error}"])
            raise

    def _verb(self, line: str) -> Any:
        words = flags.split(line, prog=f"%{NAME}")
        verbs = flags.verbs()
        if not words:
            _say(self.status())
            return None
        if words[0] in flags.HELP or any(word in flags.HELP[:2] for word in words[1:]):
            _say(flags.verb_help(words[0]) if words[0] in verbs else flags.line_help())
            return None
        if words[0] not in verbs:
            raise FlagError(f"%{NAME}: there is no verb {words[0]!r}.{flags.near(words[0], verbs)} Verbs: {', '.join(verbs)}. To profile a cell put %%{NAME} at its top.")
        verb = verbs[words[0]]
        return verb.run(flags.parse(words[1:], verb.FLAGS, prog=f"%{NAME} {words[0]}"), self.shell)

    def status(self) -> str:
        """What ``%memprof`` alone says."""
        capture = self.shell.user_ns.get("_memprof")
        shown = f"last capture (_memprof): {capture!r}" if isinstance(capture, Capture) else "no capture yet: put %%memprof at the top of a cell"
        return f"memprof: auto is {'on' if self.auto else 'off'} · {shown}\nVerbs: {', '.join(flags.verbs())}. %memprof? and %%memprof? say more."


def present(capture: Capture, view: str = "first") -> None:
    """Show a capture by the view of this name; a view that fails says so and keeps the cell's result whole."""
    try:
        importlib.import_module(f"nbmemprof.views.{view}").show(capture)
    except Exception as error:
        _say(f"memprof: the report (peak and all) could not be drawn: {type(error).__name__}: {error}\nThe capture is in _memprof: {capture!r}. Try --view text.")


def last(shell: Any) -> Capture:
    """The last capture, or what to do to have one."""
    capture = shell.user_ns.get("_memprof")
    if not isinstance(capture, Capture):
        raise NotRecording("There is no capture yet (_memprof is not one). Put %%memprof at the top of a cell and run it, or open a file with %memprof load FILE.")
    return capture


def of(shell: Any) -> Magics | None:
    """The magics loaded in this shell."""
    return getattr(shell, _ATTRIBUTE, None)


def load(shell: Any) -> None:
    """``%load_ext nbmemprof``; what an earlier load left is taken away first."""
    unload(shell)
    magics = Magics(shell)
    magics.register()
    setattr(shell, _ATTRIBUTE, magics)


def unload(shell: Any) -> None:
    """``%unload_ext nbmemprof``."""
    magics = of(shell)
    if magics is not None:
        magics.unregister()
        delattr(shell, _ATTRIBUTE)


def _say(text: str, file: Any = None) -> None:
    print(text, file=file)


def _runs_silently() -> bool:
    """Whether the shell is about to run this text without its events (``%run cells.ipy``): then the cell magic does it."""
    frame, depth = sys._getframe(1), 0
    while frame.f_back is not None and depth < 8:
        frame, depth = frame.f_back, depth + 1
        if frame.f_code.co_name == "_run_cell":
            return bool(frame.f_locals.get("silent"))
    return False
