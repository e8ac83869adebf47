"""Pictures of a warp's accesses: numbers in words, shapes for each lane, nothing outside the frame."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ET

import numpy as np
import patterns
import pytest
from hypothesis import given, settings

import nbmemprof as mp
from nbmemprof.views import warp

NS = "{http://www.w3.org/2000/svg}"


def drawn(access):
    svg, sentence = warp.picture(access)
    return ET.fromstring(svg.markup()), sentence, svg


def words(root):
    return [e.text for e in root.iter(f"{NS}text")]


def test_sectors_are_drawn_with_the_lanes_that_touch_them():
    root, sentence, _ = drawn(mp.access.global_load(lambda t: 3 * t))
    assert sentence == "Global load, 4 B a lane, 12 B apart: 12 sectors in 3 lines where 4 would do, 33.3 % of the bytes used."
    assert "12 sectors of 32 B, 4 needed" in words(root)
    assert [f"line {n}" for n in range(3)] == [w for w in words(root) if w.startswith("line ")]
    assert len(list(root.iter(f"{NS}line"))) == 32 + 3  # lanes and lines


def test_banks_show_each_lane_in_the_pass_that_serves_it():
    root, _, _ = drawn(mp.access.shared_load(lambda t: 16 * t))
    assert "16 wavefronts, 1 needed" in words(root)
    extra = [e for e in root.iter(f"{NS}rect") if e.get("fill") == warp.EXTRA]
    assert len(extra) == 30  # two banks, sixteen words each; the first of each is no conflict


def test_lanes_that_share_a_word_are_counted_together():
    root, _, _ = drawn(mp.access.shared_load(lambda t: 0))
    assert "32×" in words(root)


@given(patterns.patterns())
@settings(max_examples=60, deadline=None)
@pytest.mark.cost(0.6)
def test_every_pattern_fits_its_frame_and_a_saved_cell(pattern):
    made = {"global": mp.access.global_load, "shared": mp.access.shared_load}[pattern.space.split()[0]](pattern.places, pattern.width)
    root, _, svg = drawn(made)
    for rect in root.iter(f"{NS}rect"):
        assert float(rect.get("x")) + float(rect.get("width")) <= svg.width
        assert float(rect.get("y")) + float(rect.get("height")) <= svg.height
    bundle = made._repr_mimebundle_()
    assert len(bundle["text/html"]) + len(bundle["text/plain"]) < 80_000


def test_output_needs_no_trust_and_says_that_it_is_modelled():
    bundle = mp.access.shared_store(lambda t: 32 * t)._repr_mimebundle_()
    (image,) = re.findall(r"<img\b[^>]*>", bundle["text/html"])
    assert 'alt="Shared store, 4 B a lane, 128 B apart: 32 wavefronts' in image
    assert base64.b64decode(re.search(r"base64,([^\"]+)", image)[1]).startswith(b"<svg")
    assert "modelled" in bundle["text/html"]
    assert "• Pad each row of 128 B by 4 B" in bundle["text/plain"]


def test_a_traced_kernel_is_a_table_with_its_worst_places_drawn():
    def naive(source, target):
        x, y = cuda.grid(2)  # noqa: F821
        target[x, y] = source[y, x]

    trace = mp.access.trace(naive, np.zeros((64, 64), np.float32), np.zeros((64, 64), np.float32), grid=(2, 8), block=(32, 8))
    bundle = trace._repr_mimebundle_()
    assert len(re.findall("<img", bundle["text/html"])) == 1
    assert "naive, block of 32 × 8 threads: line" in bundle["text/plain"]
    assert "32 sectors in 32 lines where 4 would do" in bundle["text/plain"]
    assert "target[x, y] = source[y, x]" in bundle["text/plain"]


def test_markup_in_a_kernel_s_text_stays_text():
    def odd(a):
        a[0]  # <script>alert(1)</script>

    html = mp.access.trace(odd, np.zeros(4, np.float32))._repr_mimebundle_()["text/html"]
    assert "<script" not in html


def test_a_kernel_that_touches_nothing_says_so():
    assert "touches no memory" in mp.access.trace(lambda: None)._repr_mimebundle_()["text/plain"]


def test_a_single_lane_s_access_is_no_waste_and_a_load_and_store_of_the_same_words_are_drawn_once():
    def odd(data, sums):
        t = cuda.threadIdx.x  # noqa: F821
        data[8 * t] = data[8 * t] + 1
        if t == 0:
            sums[0] = data[0]

    bundle = mp.access.trace(odd, np.zeros(256, np.float32), np.zeros(1, np.float32))._repr_mimebundle_()
    assert len(re.findall("<img", bundle["text/html"])) == 1
    assert "line " in bundle["text/plain"].split("·")[0]
    assert "32 sectors in 8 lines where 4 would do" in bundle["text/plain"].split("·")[0]
