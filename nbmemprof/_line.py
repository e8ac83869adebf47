"""The magic's own line in a cell's text: found, made a comment, taken away."""

from __future__ import annotations

import re

__all__ = ["NAME", "as_comment", "find", "first", "without"]

NAME = "memprof"
_LINE = re.compile(rf"%%{NAME}(?:[ \t]+(.*?))?\s*$")


def first(lines: list[str]) -> bool:
    """Whether a cell begins with the magic's line (empty lines before it)."""
    return _LINE.match(next((line for line in lines if line.strip()), "")) is not None


def as_comment(lines: list[str]) -> list[str]:
    """A cell that begins with the magic's line, as it is to run: the line a comment, so that line numbers stay; dropped above another cell magic."""
    at = next(i for i, line in enumerate(lines) if line.strip())
    same = [at, *_same_below(lines, at)]
    lines = [f"# {line}" if i in same else line for i, line in enumerate(lines)]
    rest = next((i for i, line in enumerate(lines) if i > same[-1] and line.strip()), None)
    return lines[rest:] if rest is not None and lines[rest].startswith("%%") else lines


def find(raw: str | None) -> tuple[str | None, bool]:
    """The magic's line in a cell as typed, without its name, and whether it stands below other cell magics."""
    if not raw or f"%%{NAME}" not in raw:
        return None, False
    lines = _cleaned(raw)
    for i, line in enumerate(lines):
        match = _LINE.match(line)
        if match is not None:
            more = (_LINE.match(lines[again]) for again in _same_below(lines, i))  # written twice, it is one with the flags of both
            return " ".join(found.group(1) or "" for found in (match, *more) if found is not None).strip(), i > 0
        if not line.startswith("%%"):
            break
    return None, False


def without(raw: str | None) -> str:
    """A cell as typed with our own line a comment; without it where another cell magic follows."""
    lines = _cleaned(raw or "")
    at = next((i for i, line in enumerate(lines) if _LINE.match(line)), None)
    if at is None:
        return raw or ""
    rest = next((line for line in lines[at + 1 :] if line.strip()), "")
    return "".join(lines[:at] + ([] if rest.startswith("%%") else ["# " + lines[at]]) + lines[at + 1 :])


def _cleaned(raw: str) -> list[str]:
    """The lines of a cell as the shell gives them to our transformer."""
    from IPython.core.inputtransformer2 import classic_prompt, ipython_prompt, leading_empty_lines, leading_indent

    lines = raw.splitlines(keepends=True)
    for clean in (leading_empty_lines, leading_indent, classic_prompt, ipython_prompt):
        lines = clean(lines)
    return lines


def _same_below(lines: list[str], at: int) -> list[int]:
    """The magic's line again, just below itself (empty lines between)."""
    found: list[int] = []
    for i in range(at + 1, len(lines)):
        if _LINE.match(lines[i]):
            found.append(i)
        elif lines[i].strip():
            break
    return found
