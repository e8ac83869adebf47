"""What got worse from one run to the other."""

from __future__ import annotations

import json
from types import SimpleNamespace

import polars as pl
import pytest
from hypothesis import given, settings
from strategies import Allocator, allocators, capture, frames

import nbmemprof as mp
from nbmemprof import flags, heap
from nbmemprof.__main__ import main
from nbmemprof.analyses.diff import BY
from nbmemprof.capture import Capture
from nbmemprof.verbs import diff as verb

MIB = 1 << 20
MAIN = "train.py:90 main"


def run(blocks: list[tuple[str, int, bool]]) -> Capture:
    """Allocations of (line, MiB, kept), all live together at the peak."""
    a = Allocator()
    made = [(a.malloc(size * MIB, frames(line, MAIN)), kept) for line, size, kept in blocks]
    for block, kept in made:
        if not kept:
            a.free(block)
    tables = capture([a]).tables
    return heap.build({n: tables[n] for n in ("events", "segments", "blocks", "stacks")}, source="test")


BEFORE = [("model.py:5 build", 4, True), ("train.py:20 step", 8, False), ("data.py:7 load", 2, True)]


def on(device: int | None, blocks: list[tuple[str, int, bool]]) -> Capture:
    """The same on another GPU, or on the host."""
    made = run(blocks)
    kind = "device" if device is not None else "host"
    tables = {}
    for name in ("events", "segments", "blocks", "stacks"):
        frame = made.tables[name]
        if "device" in frame.columns:
            frame = frame.with_columns(pl.lit(device, dtype=pl.Int64).alias("device"), pl.lit(kind, dtype=frame.schema["kind"]).alias("kind"))
        tables[name] = frame
    return heap.build(tables, source="test")


@pytest.mark.parametrize(("device", "word"), [(None, "host memory"), (3, "GPU 3")])
def test_one_device_each_is_compared_be_it_another(device, word, tmp_path, capsys):
    before, after = on(device, BEFORE), run([("model.py:5 build", 6, True), *BEFORE[1:]])
    found = mp.diff(before, after)
    assert found.select("device", "site", "change_bytes", "verdict").rows() == [(0, "model.py:5", 2 * MIB, "worse")]
    before.save(tmp_path / "a.nbmem")
    after.save(tmp_path / "b.nbmem")
    assert main(["diff", str(tmp_path / "a.nbmem"), str(tmp_path / "b.nbmem"), "--fail-above", "10%"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"before: {word}; after: GPU 0\nGPU 0 peak: 14 MiB → 16 MiB, +2 MiB (+14.3%)")


def test_runs_on_several_devices_of_which_none_is_shared_say_so(capsys):
    two = [on(d, BEFORE).tables for d in (4, 5)]
    both = heap.build({n: pl.concat([t[n] for t in two]) if n != "stacks" else two[0][n] for n in ("events", "segments", "blocks", "stacks")}, source="test")
    from nbmemprof.views import changes

    said = changes.report(both, run(BEFORE))
    assert said.splitlines()[:2] == ["before: GPU 4, GPU 5; after: GPU 0", "no device is in both runs"]


def test_each_line_says_what_became_of_it_the_worst_first():
    after = run([("model.py:5 build", 4, True), ("train.py:20 step", 12, False), ("cache.py:3 put", 6, True)])
    found = mp.diff(run(BEFORE), after)
    assert found.select("site", "a_bytes", "b_bytes", "change_bytes", "a_count", "b_count", "verdict").rows() == [
        ("cache.py:3", 0, 6 * MIB, 6 * MIB, 0, 1, "new"),
        ("train.py:20", 8 * MIB, 12 * MIB, 4 * MIB, 1, 1, "worse"),
        ("data.py:7", 2 * MIB, 0, -2 * MIB, 1, 0, "gone"),
    ]
    assert found["change_share"].to_list() == [None, 0.5, -1.0]
    assert found["device"].unique().to_list() == [0]
    assert found["origin"].unique().to_list() == ["measured"]
    assert mp.diff(after, run(BEFORE))["verdict"].to_list() == ["new", "better", "gone"]


def test_at_the_end_only_what_was_kept_counts():
    found = mp.diff(run(BEFORE), run([*BEFORE, ("train.py:31 log", 2, True)]), at="end")
    assert found.select("site", "change_bytes").rows() == [("train.py:31", 2 * MIB)]


def test_as_many_bytes_in_more_blocks_is_told_but_not_as_worse():
    found = mp.diff(run([("a.py:1 f", 4, True)]), run([("a.py:1 f", 2, True), ("a.py:1 f", 2, True)]))
    assert found.select("change_bytes", "a_count", "b_count", "verdict").rows() == [(0, 1, 2, "same")]


def test_lines_that_moved_within_their_function_are_followed():
    """A new import at the top of the file moves all lines by two; nothing got worse."""
    before = run([("model.py:5 build", 4, True), ("model.py:9 build", 8, True), ("train.py:20 step", 2, True)])
    moved = run([("model.py:7 build", 4, True), ("model.py:11 build", 10, True), ("train.py:20 step", 2, True)])
    found = mp.diff(before, moved)
    assert found.select("site", "a_site", "change_bytes", "verdict").rows() == [("model.py:11", "model.py:9", 2 * MIB, "worse")]
    assert mp.diff(before, run([("model.py:7 build", 4, True), ("model.py:11 build", 8, True), ("train.py:20 step", 2, True)])).is_empty()


def test_a_line_in_another_function_is_new():
    found = mp.diff(run([("model.py:5 build", 4, True)]), run([("model.py:7 forward", 4, True)]))
    assert found["verdict"].to_list() == ["new", "gone"]


@pytest.mark.parametrize("by", BY)
def test_a_run_and_itself_differ_in_nothing_by_anything(by):
    a = run(BEFORE)
    for at in ("peak", "end"):
        found = mp.diff(a, a, by, at=at)
        assert found.is_empty()
        assert by in found.columns


@pytest.mark.cost(1.4)
@settings(max_examples=15, deadline=None)
@given(allocators(), allocators())
def test_diff_laws(one, two):
    """Nothing between a run and itself; the changes add up to the change of the whole; the other way round has the other sign."""
    a, b = capture([one]), capture([two])
    for at in ("peak", "end"):
        assert mp.diff(a, a, at=at).is_empty()
        there, back = mp.diff(a, b, at=at), mp.diff(b, a, at=at)
        assert there["change_bytes"].sum() == mp.sites(b, at=at)["size_bytes"].sum() - mp.sites(a, at=at)["size_bytes"].sum()
        assert sorted(there["change_bytes"].to_list()) == sorted((-back["change_bytes"]).to_list())
        assert there["change_bytes"].to_list() == sorted(there["change_bytes"].to_list(), reverse=True)


def test_categories_are_compared_too():
    a, b = (_weighed(size) for size in (4, 6))
    assert mp.diff(a, b, "category").select("category", "change_bytes", "verdict").rows() == [("weights", 2 * MIB, "worse")]


def _weighed(size: int) -> Capture:
    made = run([("model.py:5 build", size, True)])
    made.tables["allocations"] = made.allocations.with_columns(category=pl.lit("weights").cast(made.allocations.schema["category"]))
    return made


def test_two_snapshots_and_two_files(fixtures, tmp_path):
    folder = fixtures / "snapshots"
    one, two = folder / "s01_plain_leak.pickle", folder / "s02_protocol5.pickle"
    assert mp.diff(one, one).is_empty()
    assert mp.diff(mp.load(one), two)["change_bytes"].sum() == mp.sites(mp.load(two))["size_bytes"].sum() - mp.sites(mp.load(one))["size_bytes"].sum()
    saved = run(BEFORE).save(tmp_path / "before.nbmem")
    assert mp.diff(saved, run(BEFORE)).is_empty()


@pytest.mark.parametrize(("by", "at", "said"), [("file", "peak", "by='file'"), ("site", "noon", "at='noon'")])
def test_what_does_not_exist_is_refused(by, at, said):
    with pytest.raises(mp.NbmemprofError, match=said):
        mp.diff(run(BEFORE), run(BEFORE), by, at=at)


# ---------------------------------------------------------------------- the command line
@pytest.fixture
def files(tmp_path):
    """A run, and one whose peak is 1 MiB (7.1 %) and whose end is 1 MiB higher."""
    worse = [*BEFORE[:2], ("data.py:7 load", 3, True)]
    return str(run(BEFORE).save(tmp_path / "a.nbmem")), str(run(worse).save(tmp_path / "b.nbmem"))


@pytest.mark.parametrize(
    ("allowed", "status"), [(None, 0), ("2%", 1), ("7%", 1), ("20%", 0), ("512KiB", 1), ("1MiB", 0), ("0", 1)]
)
def test_the_exit_status_says_whether_memory_grew_above_what_is_allowed(files, allowed, status, capsys):
    assert main(["diff", *files, *(["--fail-above", allowed] if allowed else [])]) == status
    said = capsys.readouterr().out
    assert "peak: 14 MiB → 15 MiB, +1 MiB (+7.1%)" in said
    assert "at the end: 6 MiB → 7 MiB, +1 MiB (+16.7%)" in said
    assert "data.py:7" in said
    assert "worse" in said
    assert ("FAILED" in said) == (status == 1)


def test_better_and_equal_pass(files):
    assert main(["diff", files[1], files[0], "--fail-above", "0"]) == 0
    assert main(["diff", files[0], files[0], "--fail-above", "0%"]) == 0


def test_json_has_all_rows(files, capsys):
    assert main(["diff", *files, "--json", "--fail-above", "2%", "--by", "category"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert made["failed"] is True
    assert made["changes"][0]["change_bytes"] == MIB
    assert {row["measure"] for row in made["totals"]} >= {"peak", "at the end"}


@pytest.mark.parametrize("words", [["--fail-above=-3%"], ["--fail-above", "much"], ["--by", "colour"]])
def test_what_makes_no_sense_is_told_with_status_two(files, words, capsys):
    assert main(["diff", *files, *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_growth_that_cannot_be_known_does_not_pass_as_none(tmp_path, capsys):
    """In CI a comparison of nothing must not be green."""
    empty = str(Capture.build({}, source="none").save(tmp_path / "empty.nbmem"))
    assert main(["diff", empty, empty, "--fail-above", "2%"]) == 2
    assert "can't be judged" in capsys.readouterr().err


# ---------------------------------------------------------------------- the verb
def test_the_verb_takes_names_and_files_and_the_last_capture(files, capsys):
    shell = SimpleNamespace(user_ns={"before": run(BEFORE), "_memprof": run([*BEFORE, ("train.py:31 log", 2, True)])})
    verb.run(flags.parse("before", verb.FLAGS, prog="%memprof diff"), shell)
    assert "train.py:31" in capsys.readouterr().out
    verb.run(flags.parse([*files, "--by", "category", "--at", "end"], verb.FLAGS, prog="%memprof diff"), shell)
    assert "Changes by category, at the end" in capsys.readouterr().out
    with pytest.raises(mp.NbmemprofError, match="Did you mean 'before'"):
        verb.run(flags.parse("befor", verb.FLAGS, prog="%memprof diff"), shell)
