"""Counted kernels as a person sees them."""

from __future__ import annotations

import base64
import re

import pytest
from counters.test_kernels import CONFLICTS, COPY, STRIDED, capture, line_row

from nbmemprof import schema
from nbmemprof.capture import Capture
from nbmemprof.flags import view_names
from nbmemprof.views import first, kernels, report, text


def told(**meta):
    made = capture(STRIDED, CONFLICTS, COPY, lines=[line_row()])
    made.meta.update({"device": "NVIDIA H200", "counters": {"how": "cupti", "passes": 6, "total_s": 1.5}} | meta)
    return made


def test_the_headline_has_the_time_the_passes_and_the_cost():
    assert kernels.headline(told()) == (
        "3 kernels counted, 7.68 ms on the GPU · each run 6 times by CUPTI, what it wrote put back in between · counting took 1.5 s · measured here on NVIDIA H200"
    )


def test_the_table_has_the_longest_kernel_first_and_says_what_is_cut():
    title, head, rows = kernels.table(told(), 2)
    assert title == "Kernels, longest first (2 of 3)"
    assert [row[head.index("kernel")] for row in rows] == ["k1", "k0"]
    assert rows[1][head.index("sectors a load (ideal)")] == "32.0 (4.0)"
    assert rows[0][head.index("bank ways")] == "32.0"
    assert "local memory" not in head  # none has any


def test_lines_stand_beside_their_code():
    _, head, rows = kernels.line_table(told(), 5)
    assert dict(zip(head, rows[0], strict=True)) == {
        "kernel": "k0", "line": "12", "code": "y[i] = x[i * 32];", "access": "global load, 4 B", "stride": "32", "a warp": "32.0 sectors", "would do": "4.0", "excess": "2\u202f800",
    }  # fmt: skip


def test_text_and_html_say_the_same_and_need_no_trust():
    made = first.bundle(told())
    for part in made.values():
        assert "32 sectors where 4 would do" in part
        assert "3 kernels counted" in part
    assert re.search(r"<(script|style|iframe)|\son\w+=", made["text/html"]) is None
    assert sum(len(part.encode()) for part in made.values()) < first.BUDGET_BYTES


def test_the_picture_says_what_it_shows():
    (alt, data) = re.search(r'<img alt="([^"]*)" src="data:image/svg\+xml;base64,([^"]*)"', first.bundle(told())["text/html"]).groups()
    assert alt == "DRAM bandwidth of the longest kernels in TB/s: k1 0.40, k0 4.09, k2 4.20; the best measured on such a card is 4.37."
    assert "<title>" in base64.b64decode(data).decode()


def test_what_went_less_well_is_said():
    assert kernels.sentences(told(warnings=["kernels have no names: a reason"]))[-1] == "Kernels have no names: a reason."


def test_names_from_a_kernel_are_text():
    made = first.bundle(capture(COPY, name="<b>bold</b>"))["text/html"]
    assert "<b>" not in made


@pytest.mark.cost(0.6)
def test_memory_and_kernels_of_one_cell_are_one_report():
    counted = told()
    blocks = schema.fill("blocks", {"device": 0, "kind": "device", "source": "torch", "snapshot_id": 0, "addr": [0], "segment_addr": [0], "size_bytes": [1 << 20], "state": "active_allocated"}, height=1)
    both = Capture.build({"blocks": blocks, "kernels": counted.kernels, "metrics": counted.metrics}, source="torch_history")
    said = text.report(both)
    assert said.index("1 MiB live") < said.index("3 kernels counted")
    assert "1 MiB live" in first.bundle(both)["text/plain"]
    assert "3 kernels counted" in first.bundle(both)["text/html"]
    assert "3 kernels counted" in report.page(both)


def test_without_the_cards_ceilings_the_bars_say_so():
    _, sentence = kernels.picture(capture(COPY, ceilings={}))
    assert sentence == "DRAM bandwidth of the longest kernels in TB/s: k0 4.20."


def test_the_view_kernels_is_offered_and_says_where_nothing_was_counted(capsys):
    assert "kernels" in view_names()
    kernels.show(Capture.build({}))
    assert "No kernels were counted in this capture" in capsys.readouterr().out


def test_many_kernels_stay_below_the_budget():
    made = first.bundle(capture(*[STRIDED] * 40, name=[f"kernel_with_a_long_name_{i}" * 5 for i in range(40)]))
    assert sum(len(part.encode()) for part in made.values()) < first.BUDGET_BYTES
