"""One parser of the magics' lines: it feeds ``%%memprof``, every ``%memprof VERB``, help and ``?``.

A flag is declared in the file that needs it (``FLAGS`` of a source or a verb) and found by its place.
A line that can't be understood raises :class:`FlagError`; nothing has run by then.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import keyword
import os
import pkgutil
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from nbmemprof.errors import FlagError, NbmemprofError

__all__ = [
    "BASE",
    "HELP",
    "Flag",
    "capture_path",
    "cell_flags",
    "cell_help",
    "describe",
    "existing_path",
    "folder_path",
    "identifier",
    "line_help",
    "modules",
    "near",
    "parse",
    "split",
    "verb_help",
    "verbs",
]


HELP = ("--help", "-h", "help")


@dataclass(frozen=True)
class Flag:
    """One flag (``--save``) or one positional word (``FILE``, a name without a dash; with the action ``append`` any number of them).

    ``type`` turns the text into a value and refuses it with :class:`FlagError`; ``choices`` are words or
    a function that finds them, called only when they are needed.
    """

    names: str | tuple[str, ...]
    help: str
    type: Callable[[str], Any] | None = None
    choices: Sequence[str] | Callable[[], Sequence[str]] | None = None
    default: Any = None
    action: str = "store"
    metavar: str | None = None
    optional: bool = True

    @property
    def all_names(self) -> tuple[str, ...]:
        """Every way to write it."""
        return (self.names,) if isinstance(self.names, str) else self.names

    @property
    def positional(self) -> bool:
        """Whether it is a word by its place."""
        return not self.all_names[0].startswith("-")

    @property
    def dest(self) -> str:
        """Attribute of the parsed line."""
        return max(self.all_names, key=len).lstrip("-").replace("-", "_").lower()

    def words(self) -> list[str]:
        """The choices, found now; empty when any text is taken."""
        return list(self.choices() if callable(self.choices) else self.choices or ())

    def usage(self) -> str:
        """How it is written: ``--save FILE``."""
        value = self.metavar or ("|".join(self.words()) if self.choices else self.dest.upper())
        if self.positional:
            return f"[{value}]" if self.optional else value
        names = ", ".join(self.all_names)
        return names if self.action == "store_true" else f"{names} {value}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FlagError(f"{self.prog}: {message[:1].upper()}{message[1:]}. See {self.prog.split()[0]}? for what it takes.")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        self.error(message or f"stopped with status {status}")


def modules(room: str) -> dict[str, ModuleType]:
    """Every module of one of the package's rooms (``sources``, ``verbs``), by name; private ones are left out."""
    package = importlib.import_module(f"nbmemprof.{room}")
    names = sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))
    return {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}


def near(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'save'?`` or nothing."""
    names = list(known)
    bare = {name.lstrip("-"): name for name in names}
    found = difflib.get_close_matches(word.lower(), names, 1, 0.6) or [bare[m] for m in difflib.get_close_matches(word.lstrip("-").lower(), bare, 1, 0.6)]
    return f" Did you mean {found[0]!r}?" if found else ""


def split(line: str, *, prog: str = "%%memprof") -> list[str]:
    """Split a line as a shell would: quotes keep spaces together."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    if os.name == "nt":
        lexer.escape = ""
    try:
        return list(lexer)
    except ValueError as error:
        raise FlagError(f"{prog}: the line can't be split into words ({error}): {line.strip()!r}. Close the quotes.") from error


def _checked(flag: Flag, prog: str) -> Callable[[str], Any]:
    def value(text: str) -> Any:
        words = flag.words()
        if words and text not in words:
            raise FlagError(f"{prog}: {flag.all_names[0]} can't be {text!r}.{near(text, words)} It takes: {', '.join(words)}.")
        try:
            return flag.type(text) if flag.type else text
        except FlagError as error:
            raise FlagError(f"{prog}: {flag.all_names[0]}: {error}") from error
        except (TypeError, ValueError) as error:
            raise FlagError(f"{prog}: {flag.all_names[0]} can't be {text!r} ({error}). It takes: {flag.usage()}.") from error

    return value


def parse(line: str | Sequence[str], flags: Sequence[Flag], *, prog: str = "%%memprof") -> argparse.Namespace:
    """Understand one line, or say what in it can't be.

    Raises
    ------
    FlagError
        Names the flag or word, the nearest that exists, and all that exist.
    """
    words = split(line, prog=prog) if isinstance(line, str) else list(line)
    parser = _Parser(prog=prog, add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    for flag in flags:
        if flag.positional:
            several = "*" if flag.action == "append" else "?"
            parser.add_argument(flag.dest, nargs=several if flag.optional else None, type=_checked(flag, prog), metavar=flag.metavar or flag.names)
        elif flag.action == "store":
            parser.add_argument(*flag.all_names, dest=flag.dest, type=_checked(flag, prog), metavar=flag.metavar)
        else:
            parser.add_argument(*flag.all_names, dest=flag.dest, action=flag.action, default=flag.default)
    known = [name for flag in flags if not flag.positional for name in flag.all_names]
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name != "--" and name not in known:
            _refuse(name, known, flags, prog)
    for flag in flags:
        _needs(flag, words, prog)
    args, stray = parser.parse_known_args(words)
    if stray:
        _refuse(stray[0], known, flags, prog)
    for flag in flags:  # not given to argparse, which would check them as if they had been written
        if getattr(args, flag.dest) is None:
            setattr(args, flag.dest, flag.default)
    return args


def _needs(flag: Flag, words: list[str], prog: str) -> None:
    """Say what a flag takes that stands there without its value."""
    if flag.positional or flag.action != "store":
        return
    for word, after in zip(words, [*words[1:], "--"], strict=False):
        if word in flag.all_names and after.startswith("--"):
            takes = f"One of: {', '.join(flag.words())}." if flag.words() else ""
            try:
                if flag.type and not takes:
                    flag.type("")
            except (FlagError, NbmemprofError) as error:  # its own words on what it takes
                takes = str(error)
            except (TypeError, ValueError):
                pass
            raise FlagError(f"{prog}: {word} needs a value: {flag.usage()}. {takes}".rstrip())


def _refuse(word: str, known: list[str], flags: Sequence[Flag], prog: str) -> NoReturn:
    if word in HELP:
        raise FlagError(f"{prog}: this is what it takes; nothing was run.\n\n{cell_help() if prog.startswith('%%') else line_help()}")
    what = f"there is no flag {word!r}" if word.startswith("-") else f"{word!r} is one word too many"
    takes = ", ".join(flag.usage() for flag in flags) or "nothing"
    raise FlagError(f"{prog}: {what}.{near(word, known)} It takes: {takes}. Nothing was run.")


def describe(flags: Sequence[Flag], indent: str = "    ") -> str:
    """The flags, one a line, aligned, as they stand in help and ``?``."""
    rows = []
    for flag in flags:
        default = f" (default: {flag.default})" if isinstance(flag.default, str) and flag.default else ""
        rows.append((flag.usage(), flag.help + default))
    width = max((len(usage) for usage, _ in rows), default=0)
    return "\n".join(f"{indent}{usage.ljust(width)}  {text}" for usage, text in rows)


# ---------------------------------------------------------------------- kinds of values
def identifier(text: str) -> str:
    """A name that Python takes."""
    if not text.isidentifier() or keyword.iskeyword(text):
        raise FlagError(f"{text!r} is not a name that Python takes. Use letters, digits and underscores, like cap_1.")
    return text


def capture_path(text: str) -> Path:
    """Where a capture is to be saved: the suffix says how. An existing file is replaced."""
    path = Path(text).expanduser()
    if path.suffix not in ("", ".nbmem", ".html"):
        raise FlagError(f"{text!r} has the suffix {path.suffix!r}, which can't be written. Use .nbmem, .html, or no suffix for a folder of Parquet.")
    if not path.parent.is_dir():
        raise FlagError(f"the folder {str(path.parent)!r} does not exist. Make it first, or save elsewhere.")
    if path.suffix and path.is_dir():
        raise FlagError(f"{text!r} is a folder. Name a file in it.")
    if not path.suffix and path.is_file():
        raise FlagError(f"{text!r} is a file; a name without suffix is a folder of Parquet. Use .nbmem or .html, or another name.")
    return path


def folder_path(text: str) -> Path:
    """A folder that is there or can be made."""
    path = Path(text).expanduser()
    there = next((above for above in (path, *path.parents) if above.exists()), path)
    if not there.is_dir():
        raise FlagError(f"{str(there)!r} is a file. Name a folder.")
    return path


def existing_path(text: str) -> Path:
    """A file or folder that is there."""
    path = Path(text).expanduser()
    if not path.exists():
        beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise FlagError(f"{text!r} does not exist.{near(path.name, beside)} Check the path; names with spaces need quotes.")
    return path


# ---------------------------------------------------------------------- what the magics take
def view_names() -> list[str]:
    """Modules of ``views/`` that show a capture: those with a ``show``."""
    return [name for name, module in modules("views").items() if hasattr(module, "show")] or ["first"]


def source_names() -> list[str]:
    """What ``--source`` takes."""
    from nbmemprof import sources

    return sources.names()


BASE = (
    Flag("--source", "what records; auto: CUDA's allocator where there is a device, CPU tensors elsewhere", choices=source_names, default="auto", metavar="NAME"),
    Flag("--stacks", "frames kept for each allocation", choices=("python", "none", "all"), default="python"),
    Flag("--out", "bind the capture to this name too (_memprof always has the last)", type=identifier, metavar="NAME"),
    Flag("--save", "save it after the cell: .nbmem, .html, or a folder of Parquet; replaces what is there", type=capture_path, metavar="FILE"),
    Flag("--history", "add it to this folder of yours, as Parquet; mp.open_run(FOLDER) lists the runs", type=folder_path, metavar="FOLDER"),
    Flag("--view", "what is shown after the cell", choices=view_names, default="first", metavar="VIEW"),
    Flag(("-q", "--quiet"), "show nothing, only bind _memprof", action="store_true", default=False),
)


def cell_flags() -> list[Flag]:
    """Flags of ``%%memprof``: the base and those that sources declare."""
    return [*BASE, *(flag for module in modules("sources").values() for flag in getattr(module, "FLAGS", ()))]


def verbs() -> dict[str, ModuleType]:
    """Verbs of ``%memprof``, by name."""
    return {module.NAME: module for module in modules("verbs").values()}


def cell_help() -> str:
    """Docstring of ``%%memprof``."""
    return f"""Profile the memory of this cell; it runs as it would without the line.

    %%memprof {" ".join(f"[{flag.usage()}]" for flag in cell_flags())}

{describe(cell_flags())}

The last capture is ``_memprof``. The report comes after the cell's own output, also after an error.
Other things to do, one verb each (``%memprof VERB``; ``%memprof?``):

{_verb_rows()}
"""


def verb_help(name: str) -> str:
    """What ``%memprof VERB --help`` says."""
    module = verbs()[name]
    usage = " ".join([name, *(flag.usage() if flag.positional else f"[{flag.usage()}]" for flag in module.FLAGS)])
    return f"%memprof {usage}\n    {module.HELP}" + (f"\n{describe(module.FLAGS, '        ')}" if module.FLAGS else "")


def line_help() -> str:
    """Docstring of ``%memprof``."""
    details = "\n\n".join(map(verb_help, verbs()))
    return f"""Look at, keep and set up memory profiles.

{details}

``%%memprof`` at the top of a cell profiles that cell:

{describe(cell_flags())}
"""


def _verb_rows() -> str:
    found = verbs()
    width = max(map(len, found), default=0)
    return "\n".join(f"    {name.ljust(width)}  {module.HELP}" for name, module in found.items())
