"""The HTML page: whole, small, closed to the outside, equal to the frames."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import polars as pl
import pytest

from nbmemprof.analyses.sites import sites
from nbmemprof.analyses.summary import summary
from nbmemprof.capture import Capture
from nbmemprof.views import report


class Page(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.inside = False
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.inside = tag == "script"

    def handle_data(self, data):
        if self.inside:
            self.scripts.append((self.found[-1][1], data))

    def handle_endtag(self, tag):
        self.inside = False


def data_of(page: Page) -> list[dict]:
    return [json.loads(text) for attrs, text in page.scripts if attrs.get("type") == "application/json"]


def test_it_is_one_small_file_that_asks_for_nothing(training, tmp_path):
    path = training().to_html(tmp_path / "run.html")
    html = path.read_text(encoding="utf-8")
    assert path.stat().st_size < 2_000_000
    addresses = [v for tag, attrs in Page(html).found for n, v in attrs.items() if n in ("src", "href", "action", "data") and tag != "svg"]
    assert all(a.startswith("data:") for a in addresses)
    assert "http://" not in html.replace("http://www.w3.org/2000/svg", "") and "https://" not in html
    assert [p.name for p in tmp_path.iterdir()] == ["run.html"]


def test_only_its_own_script_may_run(training, markup):
    for capture in (training(), markup):
        page = Page(report.page(capture))
        policy = next(a["content"] for t, a in page.found if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
        running = [text for attrs, text in page.scripts if attrs.get("type") != "application/json"]
        assert len(running) == 1
        assert f"'sha256-{base64.b64encode(hashlib.sha256(running[0].encode()).digest()).decode()}'" in policy
        assert "default-src 'none'" in policy and "unsafe-eval" not in policy


def test_text_from_files_stays_text(markup):
    page = Page(report.page(markup))
    assert {tag for tag, _ in page.found} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "ul", "li", "div", "img", "i", "table", "tr", "th", "td", "details", "summary", "script", "wbr",
    }  # fmt: skip
    assert not [a for _, attrs in page.found for a in attrs if a.startswith("on")]


def test_the_embedded_timeline_is_the_frame(training):
    data = data_of(Page(report.page(training())))[0]
    values = [pl.Series(s["v"]).cum_sum().to_list() for s in data["series"]]
    assert [s["name"] for s in data["series"]] == ["weights", "gradients", "optimizer state", "activations", "inputs"]
    assert max(map(sum, zip(*values, strict=True))) == 1010 << 20 == data["peak"]["size"]
    assert pl.Series(data["rv"]).cum_sum().max() == 1780 << 20
    assert [m["name"] for m in data["marks"] if m["kind"] == "step"] == ["step 0", "step 1"]


def test_the_tables_have_the_exact_bytes_of_the_frames(two_devices):
    html = report.page(two_devices)
    for frame, column in ((summary(two_devices), "peak_allocated_bytes"), (sites(two_devices), "size_bytes")):
        for size in frame[column].drop_nulls():
            assert f'title="{size} bytes"' in html


def test_every_device_with_events_has_its_timeline(two_devices):
    assert re.findall(r"<h2>(GPU \d)</h2>", report.page(two_devices)) == ["GPU 1", "GPU 0"]
    assert len(data_of(Page(report.page(two_devices)))) == 2


def test_it_says_what_is_exact_and_what_is_not(training, two_devices):
    assert "Every block size is the allocator" in report.page(training())
    assert "have a known purpose; the others are counted as unknown" in report.page(two_devices)
    assert "Left out: 7 events." in report.page(training(dropped={"events": 7}))


def test_an_empty_capture_has_a_page_too(tmp_path):
    html = Capture.build({}, source="torch_history").to_html(tmp_path / "empty.html").read_text(encoding="utf-8")
    assert "Profile a cell that creates tensors" in html


def test_a_failed_write_leaves_nothing(training, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "page", lambda capture: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        training().to_html(tmp_path / "run.html")
    assert list(tmp_path.iterdir()) == []


def test_a_closing_tag_in_data_can_not_end_its_script():
    assert "<" not in report._json({"name": "</script><script>alert(1)</script>"})


def test_the_title_of_the_capture_is_the_title_of_the_page(training):
    assert "<title>Fine &lt;tuning&gt; · nbmemprof</title>" in report.page(training(title="Fine <tuning>"))
