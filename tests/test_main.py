"""``python -m nbmemprof show``."""

from __future__ import annotations

import pytest
from support import ROOT

from nbmemprof.__main__ import main

SNAPSHOT = ROOT / "notebooks" / "data" / "h200_gpt2_small_batch4.pickle.gz"


@pytest.mark.cost(0.9)
def test_show_prints_the_headline_and_writes_the_page(tmp_path, capsys):
    assert main(["show", str(SNAPSHOT), "--html", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert "peak" in said
    assert "GiB" in said
    assert (tmp_path / "page.html").stat().st_size < 2_000_000


def test_a_file_that_is_not_a_snapshot_is_refused_in_words(tmp_path, capsys):
    (tmp_path / "page.html").write_text("<html>")
    assert main(["show", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "page.html" in said.err
    assert "Traceback" not in said.err
