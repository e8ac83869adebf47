"""The first view: complete by itself, harmless, small, and the same for the same capture."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import polars as pl
import pytest
from support import ROOT

import nbmemprof as mp
from nbmemprof import heap, schema
from nbmemprof.allocator import Device
from nbmemprof.analyses.timeline import timeline
from nbmemprof.capture import Capture
from nbmemprof.views import first, pictures, report
from nbmemprof.views._facts import facts

# what Jupyter's sanitizer leaves of an untrusted notebook (tried in JupyterLab 4.6), and what this view may therefore use
TAGS = {"div", "p", "strong", "ul", "li", "img", "details", "summary", "table", "thead", "tbody", "tr", "th", "td"}
ATTRIBUTES = {("div", "class"), ("img", "alt"), ("img", "src"), ("img", "width"), ("img", "height")}


class Page(HTMLParser):
    """Tags, attributes, images and loose text of one view."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[tuple[str, str]] = set()
        self.images: list[dict[str, str]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {(tag, name) for name, _ in attrs}
        if tag == "img":
            self.images.append(dict(attrs))

    def handle_data(self, data):
        self.words.append(data)


def svgs(page: Page) -> list[ET.Element]:
    return [ET.fromstring(base64.b64decode(i["src"].removeprefix("data:image/svg+xml;base64,"))) for i in page.images]


def texts(svg: ET.Element) -> list[str]:
    return [e.text or "" for e in svg.iter("{http://www.w3.org/2000/svg}text")]


@pytest.fixture
def many_sites():
    """5,000 lines with long names, each holding a different size."""
    n = 5000
    events = schema.fill(
        "events",
        {
            "seq": range(n),
            "time_us": [i * 10.0 for i in range(n)],
            "action": "alloc",
            "addr": [(i + 1) << 24 for i in range(n)],
            "requested_bytes": [(i * 7919 % 5000 + 1) * 512 for i in range(n)],
            "stack_id": range(n),
            "kind": "host",
            "source": "torch",
        },
        height=n,
    )
    stacks = schema.fill(
        "stacks",
        {
            "stack_id": range(n),
            "depth": pl.repeat(0, n, eager=True),
            "function": [f"function_{i}" * 8 for i in range(n)],
            "filename": [f"/home/somebody/{'deep/' * 20}module_{i}_{'模型' * 40}.py" for i in range(n)],
            "line": range(n),
        },
    )
    return heap.build({"events": events, "stacks": stacks}, source="torch_cpu")


def test_the_bundle_has_html_and_text_and_no_widget(training):
    assert set(first.bundle(training())) == {"text/html", "text/plain"}


@pytest.mark.parametrize("options", [{}, {"on": "host"}, {"categories": False}, {"categories": False, "stacks": False}, {"oom": True}])
def test_only_what_survives_the_sanitizer_is_used(training, options):
    page = Page(first.bundle(training(**options))["text/html"])
    assert page.tags <= TAGS
    assert page.attributes <= ATTRIBUTES


def test_every_picture_has_its_sentence_with_numbers(training):
    alts = [i["alt"] for i in Page(first.bundle(training())["text/html"]).images]
    assert len(alts) == 3
    assert "peak 1010 MiB at" in alts[0] and "reserved 1.7 GiB" in alts[0] and "540 MiB at the end" in alts[0]
    assert "activations 400 MiB (40 %)" in alts[1]
    assert "model.py:20 forward 400 MiB (40 %)" in alts[2]


def test_pictures_are_labelled(training):
    over_time, by_category, _ = map(texts, svgs(Page(first.bundle(training(oom=True, limit_bytes=2 << 30))["text/html"])))
    for words in (
        "Memory over time",
        "time since the capture's start (ms)",
        "peak 1010 MiB at 21.6 ms",
        "activations",
        "OOM",
        "limit 2 GiB",
        "forward",
        "step 0",
        "reserved, highest",
    ):
        assert any(words in t for t in over_time), words
    assert "optimizer state" in by_category


def test_the_peak_is_drawn_where_the_timeline_has_it(training):
    capture = training()
    stack = facts(capture).stack(facts(capture).devices[0], 500)
    assert max(stack.totals) == 1010 << 20
    highest = timeline(capture, by="category").group_by("seq").agg(pl.col("size_bytes").sum())["size_bytes"].max()
    assert max(stack.totals) == highest


def test_the_areas_of_a_picture_add_up_and_keep_the_fixed_order(training):
    capture = training()
    known = facts(capture)
    stack = known.stack(known.devices[0], 500)
    assert stack.names == ["weights", "gradients", "optimizer_state", "activations", "inputs"]
    assert [v[stack.top] >> 20 for v in stack.values] == [300, 50, 240, 400, 20]


def test_reserved_is_never_drawn_below_allocated(training, two_devices):
    for capture in (training(), two_devices):
        known = facts(capture)
        for device in known.devices:
            stack = known.stack(device, 40)
            assert len(stack.reserved) == len(stack.xs) > 8
            assert all(held >= used for held, used in zip(stack.reserved, stack.totals, strict=True))


def test_text_from_files_stays_text_everywhere(markup):
    shown = first.bundle(markup)
    page = Page(shown["text/html"])
    assert page.tags <= TAGS and page.attributes <= ATTRIBUTES
    for svg in svgs(page):
        assert {e.tag.rpartition("}")[2] for e in svg.iter()} <= {"svg", "title", "rect", "line", "path", "text", "circle"}
    everything = " ".join(page.words) + " ".join(i["alt"] for i in page.images)
    assert "javascript:alert(1):3" in everything and "{{7*7}}" in everything
    assert all(i["src"].startswith("data:image/svg+xml;base64,") for i in page.images)


@pytest.mark.cost(0.6)
def test_names_that_are_not_ascii_arrive_whole(many_sites):
    page = Page(first.bundle(many_sites)["text/html"])
    assert any("模型" in t for svg in svgs(page) for t in texts(svg))


@pytest.mark.cost(1)
def test_what_is_saved_stays_below_80_kb(training, two_devices, many_sites):
    for capture in (training(oom=True), two_devices, many_sites):
        saved = json.dumps(first.bundle(capture), ensure_ascii=False).encode()
        assert len(saved) <= 80_000


@pytest.mark.cost(0.6)
def test_a_busy_capture_uses_its_budget_and_keeps_to_it():
    """8 devices with 4,000 events that never repeat a height."""
    per = 4000
    parts = []
    for device in range(8):
        parts.append(
            schema.fill(
                "events",
                {
                    "seq": range(device * per, (device + 1) * per),
                    "time_us": [i * 3.7 for i in range(per)],
                    "action": ["alloc", "free_requested"] * (per // 2),
                    "addr": [(i // 2 + 1) << 24 for i in range(per)],
                    "requested_bytes": [((i // 2) * 7919 % 9973 + 1) * 512 for i in range(per)],
                    "kind": "device",
                    "source": "torch",
                    "device": device,
                },
            )
        )
    capture = heap.build({"events": pl.concat(parts)}, source="torch_history")
    shown = first.bundle(capture)
    assert 20_000 < sum(len(v.encode()) for v in shown.values()) <= first.BUDGET_BYTES
    assert "of 8 devices are drawn" in shown["text/html"]


@pytest.mark.cost(0.6)
def test_cut_tables_say_n_of_m(many_sites):
    assert re.search(r"Lines that held most at the peak \(\d+ of 5\u202f000\)", first.bundle(many_sites)["text/html"])


def test_the_same_capture_gives_the_same_output(training):
    assert first.bundle(training()) == first.bundle(training())


def test_the_live_view_finds_its_mount_by_class(training):
    html = first.bundle(training())["text/html"]
    key = re.match(r'<div class="nbm nbm-([0-9a-f]{12})">', html)[1]
    assert first.Mount(key).wrap("x") == f'<div class="nbm nbm-{key}">x</div>'


def test_the_device_without_anything_is_not_the_one_shown(two_devices):
    page = Page(first.bundle(two_devices)["text/html"])
    assert page.images[0]["alt"].startswith("GPU 1: memory over time, peak 100.8 MiB")


def test_an_empty_capture_is_one_sentence():
    capture = Capture.build({}, source="none", warnings=["empty: torch was not imported"])
    shown = first.bundle(capture)
    assert facts(capture)._answers == {}, "nothing is worked out for it"
    assert Page(shown["text/html"]).images == []
    assert len(shown["text/html"]) < 400
    assert "torch was not imported" in shown["text/plain"]


def test_without_a_clock_the_axis_counts_events(training):
    capture = training()
    events = capture.events.with_columns(pl.lit(None, dtype=pl.Float64).alias("time_us"))
    clockless = heap.build({"events": events, "stacks": capture.stacks}, source="torch_snapshot")
    known = facts(clockless)
    assert known.stack(known.devices[0], 100).axis == "event"
    assert any("this source has no clock" in t for t in texts(svgs(Page(first.bundle(clockless)["text/html"]))[0]))


@pytest.mark.parametrize(("high", "sizes"), [(1 << 30, [0, 256 << 20, 512 << 20, 768 << 20, 1 << 30]), (3, [0, 1, 2, 3])])
def test_ticks_are_round_in_binary_units(high, sizes):
    assert pictures.ticks(high, 5) == sizes


def test_outside_a_notebook_it_prints_text(training, capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "IPython", None)
    first.show(training())
    assert capsys.readouterr().out.startswith("peak 1010 MiB")


def test_in_a_notebook_it_publishes_one_output(training, monkeypatch):
    published = []

    class Display:
        @staticmethod
        def display(data, **options):
            published.append((set(data), options))

    class Shell:
        display = Display

        @staticmethod
        def get_ipython():
            return object()

    monkeypatch.setitem(__import__("sys").modules, "IPython", Shell)
    first.show(training(), "an-id", update=True)
    assert published == [({"text/html", "text/plain"}, {"raw": True, "display_id": "an-id", "update": True})]


def test_facts_do_not_keep_a_capture_alive(training):
    import gc
    import weakref

    capture = training()
    first.bundle(capture)
    gone = weakref.ref(capture)
    del capture
    gc.collect()
    assert gone() is None


def test_a_cell_in_which_nothing_happened_is_one_sentence_and_cheap(training):
    before = training(on="host")
    held = before.allocations.filter(pl.col("free_seq").is_null())
    blocks = schema.fill(
        "blocks", {"addr": held["addr"], "size_bytes": held["size_bytes"], "kind": "host", "source": "torch", "snapshot_id": 0, "state": "active_allocated"}
    )
    quiet = heap.build({"blocks": blocks}, source="torch_cpu", recording={"seconds": 0.1, "events": 0})
    shown = first.bundle(quiet)
    assert "nothing was allocated or freed in this cell" in shown["text/plain"]
    assert Page(shown["text/html"]).images == []
    assert set(facts(quiet)._answers) == {("summary",)}


def test_a_picture_that_misses_the_true_peak_says_so(training):
    known = facts(training())
    device = known.devices[0]
    assert pictures.peak_words(device, device.peak) == "peak 1010 MiB"
    assert pictures.peak_words(device, 800 << 20) == "drawn up to 800 MiB (peak 1010 MiB)"


def test_a_cell_in_which_only_others_take_memory_shows_the_ledger_and_names_them():
    """Torch's allocator rests, CuPy's pool keeps 384 MiB: recorded on an H200."""
    capture = mp.load(ROOT / "notebooks" / "data" / "h200_ledger_cupy.nbmem")
    made = first.bundle(capture)
    assert "CuPy's pool keeps 384 MiB of free blocks" in made["text/plain"]
    assert "CuPy&#x27;s pool cached 384 MiB" in made["text/html"]
    same = capture.tables["samples"].filter(pl.col("source").cast(pl.String) != "cupy", pl.col("time_us") == pl.col("time_us").max().over("gauge"))
    quiet = Capture.build({**capture.tables, "samples": same}, **capture.meta)
    assert "<img" not in first.bundle(quiet)["text/html"], "nothing moved"


def test_a_timeline_with_nothing_in_it_is_not_drawn():
    """One refused request: it has a view, and nothing ever lay on the device."""
    device = Device(capacity_bytes="1GiB")
    with contextlib.suppress(mp.OutOfMemoryError):
        device.malloc("2GiB")
    capture = mp.load(device.snapshot())
    page = first.bundle(capture)["text/html"]
    assert "Out of memory" in page
    assert "<img" not in page and "over time" not in page
    assert "Memory over time" not in report.page(capture)
