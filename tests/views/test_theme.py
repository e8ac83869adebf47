"""Colours: one a category, apart for colour-blind readers, readable words on the card."""

from __future__ import annotations

import itertools

from nbmemprof import schema
from nbmemprof.views import _theme

# Viénot, Brettel and Mollon 1999: what a protanope and a deuteranope see, in linear RGB
PROTAN = ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0))
DEUTAN = ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0))
PLAIN = ((1, 0, 0), (0, 1, 0), (0, 0, 1))


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def lab(rgb: list[float]) -> tuple[float, float, float]:
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    x, y, z = (sum(a * b for a, b in zip(row, rgb, strict=True)) / w for row, w in zip(rows, (0.9505, 1.0, 1.089), strict=True))
    fx, fy, fz = ((max(v, 0) ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116) for v in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def seen(colour: str, eye) -> tuple[float, float, float]:
    rgb = linear(colour)
    return lab([sum(a * b for a, b in zip(row, rgb, strict=True)) for row in eye])


def contrast(a: str, b: str) -> float:
    light, dark = sorted((sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(x), strict=True)) for x in (a, b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_every_category_has_its_own_colour():
    assert list(_theme.CATEGORY_COLOURS) == list(schema.CATEGORIES)
    assert len(set(_theme.CATEGORY_COLOURS.values())) == len(schema.CATEGORIES)


def test_colours_stay_apart_for_colour_blind_readers():
    for eye in (PLAIN, PROTAN, DEUTAN):
        for (a, x), (b, y) in itertools.combinations(_theme.CATEGORY_COLOURS.items(), 2):
            far = sum((p - q) ** 2 for p, q in zip(seen(x, eye), seen(y, eye), strict=True)) ** 0.5
            assert far > 10, f"{a} and {b} are {far:.1f} apart"


def test_words_on_the_card_have_the_contrast_that_wcag_asks_for():
    for ink in (_theme.INK, _theme.MUTED, _theme.MARK):
        assert contrast(ink, _theme.CARD) >= 4.5, ink


def test_a_category_keeps_its_colour_wherever_it_stands():
    assert _theme.colour("weights", 0) == _theme.colour("weights", 5) == "#0072b2"
    assert _theme.colour("train.py:1", 0) != _theme.colour("train.py:1", 1)
