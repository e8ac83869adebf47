"""The SVG writer: text stays text, lines stay small, labels fit."""

from __future__ import annotations

import base64
import xml.etree.ElementTree as ET

import pytest

from nbmemprof.views.svg import Svg, clean, middle, nice_step, shorten, text_width

NS = "{http://www.w3.org/2000/svg}"


def parsed(svg: Svg) -> ET.Element:
    return ET.fromstring(svg.markup())


def test_markup_in_text_stays_text():
    svg = Svg(100, 50, '<script>alert("1")</script>')
    svg.text(1, 2, "</text><script>alert(2)</script>")
    root = parsed(svg)
    assert [e.tag for e in root.iter() if "script" in e.tag] == []
    assert root.find(f"{NS}text").text == "</text><script>alert(2)</script>"
    assert root.find(f"{NS}title").text == '<script>alert("1")</script>'


@pytest.mark.parametrize("text", ["nul\0", "esc\x1b[31m", "bell\a", "lone \ud800", "nonchar \ufffe", "bidi \u202e", "c1 \x9b"])
def test_what_xml_forbids_is_taken_out(text):
    svg = Svg(100, 50, text)
    svg.text(0, 0, text)
    parsed(svg)
    assert base64.b64decode(svg.data_uri().partition(",")[2]).decode().startswith("<svg")


@pytest.mark.parametrize("name", ["függvény.py", "模型/训练.py", "emoji_🔥.py", "naïve café"])
def test_names_of_every_script_stay_whole(name):
    assert clean(name) == name


def test_line_ends_and_tabs_become_spaces():
    assert clean("a\nb\tc\u2028d") == "a b c d"


def test_a_step_line_holds_each_value_until_the_next_and_to_the_end():
    svg = Svg(100, 50, "")
    svg.steps([0, 10, 20], [5, 5, 2], 30, stroke="#000")
    assert parsed(svg).find(f"{NS}path").get("d") == "M0 50h200v-30H300"


def test_an_area_goes_down_to_its_base_at_both_ends():
    svg = Svg(100, 50, "")
    svg.steps([0, 10], [5, 2], 30, base=40, fill="#000")
    assert parsed(svg).find(f"{NS}path").get("d") == "M0 400V50h100v-30H300V400z"


def test_ten_thousand_steps_take_less_than_twelve_bytes_each():
    svg = Svg(800, 200, "")
    svg.steps([i * 0.08 for i in range(10000)], [i % 97 * 2 for i in range(10000)], 800)
    assert len(svg.markup()) < 12 * 10000


def test_shortened_text_fits_and_keeps_both_ends():
    name = "very/long/path/to/some/module/of/a/project/train.py:123"
    short = shorten(name, 120, 11)
    assert text_width(short, 11) <= 120
    assert short.startswith("very") and short.endswith("123") and "…" in short
    assert shorten("train.py:1", 120, 11) == "train.py:1"


def test_a_huge_name_is_shortened_at_once():
    assert text_width(shorten("x" * 1_000_000, 100, 11), 11) <= 100


def test_the_middle_is_cut_only_where_text_is_too_long():
    assert middle("short") == "short"
    assert len(middle("y" * 1000, 48)) == 48


@pytest.mark.parametrize(("span", "count", "step"), [(10, 5, 2), (735, 7, 100), (0.004, 4, 0.001), (3, 5, 0.5)])
def test_steps_are_one_two_or_five(span, count, step):
    assert nice_step(span, count) == pytest.approx(step)
