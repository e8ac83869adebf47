"""Access patterns of one warp: worked examples with their numbers, what an H200 counted for some, and random ones.

A pattern is ``Pattern(space, width, places)``: byte offsets of 32 lanes, None where a lane is switched off. ``python tests/patterns.py`` draws
the 500 random ones again (hypothesis, fixed seed) and writes them to tests/fixtures/h200/patterns/random.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

FOLDER = Path(__file__).parent / "fixtures" / "h200" / "patterns"
SPACES = ("global load", "global store", "shared load", "shared store")
WINDOW = {"global": 1 << 16, "shared": 1 << 15}  # bytes that patterns may touch


class Pattern(NamedTuple):
    space: str
    width: int
    places: tuple[int | None, ...]

    def row(self) -> list:
        return [SPACES.index(self.space), self.width, [-1 if p is None else p for p in self.places]]

    @classmethod
    def of(cls, row: list) -> Pattern:
        return cls(SPACES[row[0]], row[1], tuple(None if p < 0 else p for p in row[2]))


class Example(NamedTuple):
    name: str
    pattern: Pattern
    count: int  # sectors or wavefronts
    lines: int | None = None
    ideal: int | None = None
    share: float | None = None  # efficiency of a global access, degree of a shared one


def pattern(space: str, width: int, place: Callable[[int], int | None]) -> Pattern:
    return Pattern(space, width, tuple(place(i) for i in range(32)))


def _global(name, width, place, count, lines=None, ideal=None, share=None, space="global load"):
    return Example(name, pattern(space, width, place), count, lines, ideal, share)


def _shared(name, width, place, count, ideal=None, share=None, space="shared load"):
    return Example(name, pattern(space, width, place), count, None, ideal, share)


# computed by hand from the rules of the CUDA C++ Programming Guide
WORKED = [
    _global("side by side", 4, lambda i: 4 * i, 4, 1, 4, 1.0),
    _global("shifted by one word", 4, lambda i: 4 * i + 4, 5, 2, 4, 0.8),
    _global("every second word", 4, lambda i: 8 * i, 8, 2, 4, 0.5),
    _global("every third word", 4, lambda i: 12 * i, 12, 3, 4, 1 / 3),
    _global("a sector each", 4, lambda i: 32 * i, 32, 8, 4, 0.125),
    _global("a line each", 4, lambda i: 128 * i, 32, 32, 4, 0.125),
    _global("broadcast", 4, lambda i: 0, 1, 1, 4, 0.125),
    _global("even lanes only", 4, lambda i: 4 * i if i % 2 == 0 else None, 4, 1, 2, 0.5),
    _global("bytes", 1, lambda i: i, 1, 1, 1, 1.0),
    _global("16 bytes each", 16, lambda i: 16 * i, 16, 4, 16, 1.0),
    _global("one double of three", 8, lambda i: 24 * i, 24, 6, 8, 1 / 3),
    _global("two halves apart", 4, lambda i: 4 * i if i < 16 else 4 * i + 4096, 4, 2, 4, 1.0),
    _shared("every second word", 4, lambda i: 8 * i, 2, 1, 2),
    _shared("a row of 32 words each", 4, lambda i: 128 * i, 32, 1, 32),
    _shared("a row of 33 words each", 4, lambda i: 132 * i, 1, 1, 1),
    _shared("two words a bank, each for half the lanes", 4, lambda i: 4 * (i // 2) + 128 * (i % 2), 2, 1, 2),
    _shared("bytes", 1, lambda i: i, 1, 1, 1),
    _shared("8 bytes each", 8, lambda i: 8 * i, 2, 2, 1),
    _shared("every second 8 bytes", 8, lambda i: 16 * i, 4, 2, 2),
    _shared("16 bytes each", 16, lambda i: 16 * i, 4, 4, 1),
    _shared("every eighth 16 bytes", 16, lambda i: 128 * i, 32, 4, 8),
    _shared("8 bytes, half a warp", 8, lambda i: 8 * i if i < 16 else None, 1, 1, 1),
]

# counted on an H200 by ncu, 2026-11-30, before the recordings in fixtures/h200/patterns
COUNTED = [
    _global("words", 4, lambda i: 4 * i, 4),
    _global("words shifted by 4 B", 4, lambda i: 4 * i + 4, 5),
    _global("words, stride 2", 4, lambda i: 8 * i, 8),
    _global("words, stride 3", 4, lambda i: 12 * i, 12),
    _global("words, stride 8", 4, lambda i: 32 * i, 32),
    _global("words, stride 32", 4, lambda i: 128 * i, 32),
    _global("one word", 4, lambda i: 0, 1),
    _global("words reversed", 4, lambda i: 4 * (31 - i), 4),
    _global("words, 16 lanes", 4, lambda i: 4 * i if i < 16 else None, 2),
    _global("words, even lanes", 4, lambda i: 4 * i if i % 2 == 0 else None, 4),
    _global("bytes", 1, lambda i: i, 1),
    _global("halfwords", 2, lambda i: 2 * i, 2),
    _global("8 bytes", 8, lambda i: 8 * i, 8),
    _global("16 bytes", 16, lambda i: 16 * i, 16),
    _global("16 bytes, stride 32 B", 16, lambda i: 32 * i, 32),
    *(_shared(f"words, stride {s}", 4, lambda i, s=s: 4 * s * i, n) for s, n in ((0, 1), (1, 1), (3, 1), (31, 1), (33, 1), (2, 2), (4, 4), (8, 8), (16, 16), (32, 32))),
    _shared("words, pairs share", 4, lambda i: 4 * (i // 2), 1),
    _shared("bytes", 1, lambda i: i, 1),
    _shared("halfwords", 2, lambda i: 2 * i, 1),
    *(_shared(f"8 bytes, stride {s}", 8, lambda i, s=s: 8 * s * i, n) for s, n in ((1, 2), (2, 4), (16, 32), (0, 1))),
    *(_shared(f"16 bytes, stride {s}", 16, lambda i, s=s: 16 * s * i, n) for s, n in ((1, 4), (2, 8), (8, 32), (0, 2))),
    _shared("8 bytes, pairs equal", 8, lambda i: 8 * (i // 2), 1),
    _shared("16 bytes, pairs equal", 16, lambda i: 16 * (i // 2), 2),
    _shared("8 bytes, halves equal", 8, lambda i: 8 * (i % 16), 2),
    _shared("16 bytes, quarters equal", 16, lambda i: 16 * (i % 8), 4),
    _shared("8 bytes, even lanes", 8, lambda i: 8 * i if i % 2 == 0 else None, 2),
    _shared("8 bytes, first half", 8, lambda i: 8 * i if i < 16 else None, 1),
    _shared("16 bytes, first quarter", 16, lambda i: 16 * i if i < 8 else None, 1),
]


def _dense(places: list) -> list:
    """Equal places stay equal, distinct ones become 0, 1, 2 …"""
    order = {p: n for n, p in enumerate(dict.fromkeys(p for p in places if p is not None))}
    return [None if p is None else order[p] for p in places]


def joining() -> list[tuple[str, Pattern]]:
    """Wide shared accesses that tell rules apart: when do neighbouring groups of lanes go together?"""
    shapes: list[tuple[str, list]] = [(f"equal under xor {k}", [i & ~k for i in range(32)]) for k in (1, 2, 4, 8, 16, 3)]
    shapes += [
        ("even lanes", [i if i % 2 == 0 else None for i in range(32)]),
        ("odd lanes", [i if i % 2 else None for i in range(32)]),
        ("lanes with bit 1 clear", [i if i & 2 == 0 else None for i in range(32)]),
        ("lanes with bit 2 clear", [i if i & 4 == 0 else None for i in range(32)]),
        ("lanes with bit 3 clear", [i if i & 8 == 0 else None for i in range(32)]),
        ("pairs in the first half only", [i & ~1 if i < 16 else i for i in range(32)]),
        ("pairs in the second half only", [i & ~1 if i >= 16 else i for i in range(32)]),
        ("pairs by 1 in the first half, by 2 in the second", [i & ~1 if i < 16 else i & ~2 for i in range(32)]),
        ("pairs by 1 and by 2 in turns of four lanes", [i & ~1 if i & 4 else i & ~2 for i in range(32)]),
        ("all pairs but one", [i & ~1 if i < 30 else i for i in range(32)]),
        ("all pairs but one, one of which is off", [i & ~1 if i < 30 else (i if i < 31 else None) for i in range(32)]),
        ("first half, pairs", [i & ~1 if i < 16 else None for i in range(32)]),
        ("first half", [i if i < 16 else None for i in range(32)]),
        ("second half", [i if i >= 16 else None for i in range(32)]),
        ("first quarter", [i if i < 8 else None for i in range(32)]),
        ("first and third quarter", [i if i & 8 == 0 else None for i in range(32)]),
        ("one lane of each pair, alternating", [i if (i ^ (i >> 1)) & 1 else None for i in range(32)]),
        ("one lane", [7 if i == 7 else None for i in range(32)]),
        ("lanes 0 and 31", [i if i in (0, 31) else None for i in range(32)]),
    ]
    made = []
    for width in (8, 16):
        for name, places in shapes:
            dense = _dense(places)
            made.append((f"{width} bytes, {name}", Pattern("shared load", width, tuple(None if p is None else p * width for p in dense))))
        # groups that go together show their conflicts together
        made.append((f"{width} bytes, pairs a row apart", Pattern("shared load", width, tuple((i // 2) * 128 for i in range(32)))))
        made.append((f"{width} bytes, pairs by 2, a row apart", Pattern("shared load", width, tuple((i & ~2) * 64 for i in range(32)))))
    stores = [(name.replace(",", " stored,", 1), p._replace(space="shared store")) for name, p in made if "xor" in name or "even" in name or "row" in name or "first half only" in name]
    return made + stores


# ---------------------------------------------------------------------- random patterns
@st.composite
def masks(draw) -> list[bool]:
    kind = draw(st.sampled_from(["all", "all", "all", "random", "prefix", "bit", "one"]))
    if kind == "random":
        bits = draw(st.integers(0, (1 << 32) - 1))
        return [bool(bits >> i & 1) for i in range(32)]
    if kind == "prefix":
        n = draw(st.integers(0, 32))
        return [i < n for i in range(32)]
    if kind == "bit":
        bit, value = draw(st.sampled_from([1, 2, 4, 8, 16])), draw(st.booleans())
        return [bool(i & bit) == value for i in range(32)]
    one = draw(st.integers(0, 31))
    return [kind == "all" or i == one for i in range(32)]


@st.composite
def indices(draw, limit: int) -> list[int]:
    """Elements of 32 lanes below ``limit``."""
    kind = draw(st.sampled_from(["affine", "affine", "plane", "shares", "shares", "window", "window", "swizzle", "permuted"]))
    if kind == "affine":
        stride = draw(st.integers(-70, 70) | st.sampled_from([0, 1, 2, 4, 8, 16, 32, 64, 33]))
        base = draw(st.integers(0, 64))
        found = [base + i * stride for i in range(32)]
    elif kind == "plane":
        wide = draw(st.sampled_from([2, 4, 8, 16]))
        a, b = draw(st.integers(0, 40)), draw(st.integers(0, 140))
        found = [(i % wide) * a + (i // wide) * b for i in range(32)]
    elif kind == "shares":
        keep = draw(st.sampled_from([~1, ~2, ~4, ~8, ~16, ~3, ~5, ~6, 15, 7]))
        table = draw(st.lists(st.integers(0, draw(st.sampled_from([15, 31, 255, 2000]))), min_size=32, max_size=32))
        found = [table[i & keep] for i in range(32)]
    elif kind == "window":
        most = draw(st.sampled_from([3, 15, 31, 63, 127, 511, 4095, 65535]))
        found = draw(st.lists(st.integers(0, most), min_size=32, max_size=32))
    elif kind == "swizzle":
        pitch, column = draw(st.sampled_from([8, 16, 32, 64])), draw(st.integers(0, 31))
        found = [i * pitch + ((column ^ i) % pitch) for i in range(32)]
    else:
        base = draw(st.integers(0, 40))
        found = [base + i for i in draw(st.permutations(range(32)))]
    lowest = min(found)
    return [(f - min(lowest, 0)) % limit for f in found]


@st.composite
def patterns(draw, spaces: tuple[str, ...] = SPACES) -> Pattern:
    space, width = draw(st.sampled_from(spaces)), draw(st.sampled_from([1, 2, 4, 4, 8, 8, 16, 16]))
    found = draw(indices(WINDOW[space.split()[0]] // width))
    mask = draw(masks())
    return Pattern(space, width, tuple(f * width if on else None for f, on in zip(found, mask, strict=True)))


def drawn(count: int = 500) -> list[Pattern]:
    """The same ``count`` distinct patterns each time, a quarter of each space."""
    made: dict[Pattern, None] = {}
    quota = {space: -(-count // len(SPACES)) for space in SPACES}

    @seed(20261130)
    @settings(max_examples=3 * count, database=None, phases=[Phase.generate], deadline=None, suppress_health_check=list(HealthCheck))
    @given(patterns())
    def draw_one(one: Pattern) -> None:
        if one not in made and quota[one.space] > 0 and any(p is not None for p in one.places):
            made[one] = None
            quota[one.space] -= 1

    draw_one()
    assert len(made) >= count, f"{len(made)} of {count} patterns"
    return list(made)[:count]


def stored() -> list[Pattern]:
    return [Pattern.of(row) for row in json.loads((FOLDER / "random.json").read_text())]


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(p.row(), separators=(",", ":")) for p in drawn())
    (FOLDER / "random.json").write_text(f"[\n{rows}\n]\n")


if __name__ == "__main__":
    main()
