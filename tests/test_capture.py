"""A capture is a value: complete, checked, saved and loaded without loss, refused when damaged."""

from __future__ import annotations

import gc
import io
import json
import weakref
import zipfile
from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from strategies import Allocator, allocators, capture

import nbmemprof as mp
from nbmemprof import schema
from nbmemprof.capture import Capture
from nbmemprof.errors import CantWrite, InputRefused, SchemaError


def small() -> Capture:
    a = Allocator()
    a.free(a.malloc(5000))
    a.malloc(3 << 20)
    return capture([a])


def test_a_capture_that_was_replayed_and_shown_is_let_go() -> None:
    """What is kept with a capture goes with it: in a notebook each cell has one."""
    made = small()
    mp.replay(made)
    mp.what_if(made, ["expandable_segments:True"])
    for question in (mp.summary, mp.breakdown, mp.leaks, mp.lifetimes, mp.advise, mp.fragmentation):
        question(made)
    made._repr_mimebundle_()
    seen = weakref.ref(made)
    del made
    gc.collect()
    assert seen() is None


def test_every_table_is_there_with_its_columns() -> None:
    made = Capture.build({})
    for name in schema.TABLES:
        assert list(getattr(made, name).columns) == list(schema.TABLES[name])
        assert made.tables[name].height == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [("page.html", r"cap.to_html\(path\)"), ("run.parquet", r"cap.to_parquet\(folder\)"), ("run.pickle", "writes none"), ("run.png", "tables of a capture"), ("", "writes an .nbmem file")],
)
def test_a_suffix_that_means_another_kind_of_file_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(CantWrite, match=text + r".*Use cap.save\('run.nbmem'\)"):
        small().save(str(tmp_path / name) if name else name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x89PNG\r\n\x1a\n" + bytes(40), "is a PNG picture, not a snapshot or capture"),
        (b"<!doctype html><html></html>", "is an HTML page"),
        (b"PAR1" + bytes(40), "give the folder"),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(InputRefused, match=text):
        mp.load(tmp_path / "file")


def test_weights_and_an_empty_path_are_told(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("model/data.pkl", b"\x80\x02}q\x00.")
        archive.writestr("model/data/0", bytes(12))
    with pytest.raises(InputRefused, match=r"written by torch.save: weights or other tensors.*_dump_snapshot"):
        mp.load(tmp_path / "model.pt")
    with pytest.raises(InputRefused, match="The path is empty"):
        mp.load("")
    with pytest.raises(InputRefused, match="a folder of runs is opened by mp.open_run"):
        mp.load(tmp_path)


def test_a_wrong_column_is_refused_by_name_and_both_dtypes() -> None:
    wrong = schema.empty("events").with_columns(pl.col("seq").cast(pl.Int32))
    with pytest.raises(SchemaError, match=r"'seq'.*'events'.*Int32.*Int64"):
        Capture.build({"events": wrong})


def test_a_stray_column_is_refused_by_name() -> None:
    with pytest.raises(SchemaError, match="no column 'size'"):
        schema.fill("events", {"size": [1]})


def test_an_unknown_attribute_names_the_tables() -> None:
    with pytest.raises(AttributeError, match=r"no 'evnts'.*events"):
        _ = small().evnts


@given(made=allocators(max_ops=25))
@settings(max_examples=15, deadline=None)
def test_save_then_load_is_identity(tmp_path_factory: pytest.TempPathFactory, made: Allocator) -> None:
    before = capture([made])
    folder = tmp_path_factory.mktemp("saved")
    assert mp.load(before.save(folder / "a.nbmem")) == before
    assert mp.load(before.to_parquet(folder / "parquet")) == before


def test_a_file_keeps_tables_that_its_reader_does_not_know(tmp_path: Path) -> None:
    further = Capture.build(dict(small().tables.items()) | {"of_the_future": pl.DataFrame({"a": [1, 2]})}, **small().meta)
    again = mp.load(mp.load(further.save(tmp_path / "a.nbmem")).save(tmp_path / "b.nbmem"))
    assert again.of_the_future["a"].to_list() == [1, 2]


def test_opening_reads_no_table_until_it_is_asked_for(tmp_path: Path) -> None:
    again = mp.load(small().save(tmp_path / "a.nbmem"))
    assert not any(again.tables.is_ready(name) for name in schema.TABLES)
    assert again.events.height > 0
    assert again.tables.is_ready("events")


def test_saving_leaves_no_part_behind_and_bytes_load_too(tmp_path: Path) -> None:
    path = small().save(tmp_path / "a.nbmem")
    assert [p.name for p in tmp_path.iterdir()] == ["a.nbmem"]
    assert mp.load(path.read_bytes()) == small() == mp.load(path.open("rb")) == mp.load(str(path))


def rewritten(path: Path, changes: dict[str, bytes | None]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            data = changes.get(name, old.read(name))
            if data is not None:
                new.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"meta.json": None}, "without meta.json"),
        ({"meta.json": b"{"}, "meta.json is damaged"),
        ({"meta.json": b"[" * 100_000}, "meta.json is damaged"),
        ({"meta.json": b"{}"}, "not a capture's"),
        ({"meta.json": json.dumps({"schema": 99, "meta": {}}).encode()}, "schema version 99"),
        ({"meta.json": json.dumps({"schema": 1, "meta": {"origin": "invented"}}).encode()}, "'invented'"),
        ({"events.arrow": None}, "lacks the table 'events'"),
        ({"events.arrow": b"ARROW1"}, "'events' can't be read"),
        ({"events.arrow": b""}, "'events' can't be read"),
    ],
)
def test_a_damaged_file_is_refused_with_the_part(tmp_path: Path, changes: dict[str, bytes | None], says: str) -> None:
    data = rewritten(small().save(tmp_path / "a.nbmem"), changes)
    with pytest.raises(InputRefused, match=says):
        mp.load(data).events  # noqa: B018 - reading it is the point


def test_a_member_that_holds_another_table_is_refused(tmp_path: Path) -> None:
    path = small().save(tmp_path / "a.nbmem")
    with zipfile.ZipFile(path) as archive:
        stacks = archive.read("stacks.arrow")
    with pytest.raises(InputRefused, match="'events' can't be read"):
        mp.load(rewritten(path, {"events.arrow": stacks})).events  # noqa: B018


def test_a_compressed_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.nbmem"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("meta.json", "{}" + " " * 1_000_000)
    with pytest.raises(InputRefused, match="not stored"):
        mp.load(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for given_, says in [
        (tmp_path / "none.nbmem", "can't be opened"),
        (tmp_path, "no meta.json"),
        (3, "int is not something to load"),
        (io.StringIO("text"), "mode 'rb'"),
    ]:
        with pytest.raises(InputRefused, match=says):
            mp.load(given_)


def test_the_short_repr_counts_rows() -> None:
    assert "events 6, allocations 2" in repr(small())


def test_what_can_not_be_written_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for write, target, says in [
        (small().save, tmp_path / "none" / "a.nbmem", "folder .* is not there"),
        (small().save, tmp_path, "is a folder"),
        (small().to_html, tmp_path, "is a folder"),
        (small().to_parquet, tmp_path / "file", "can't be made a folder"),
    ]:
        with pytest.raises(CantWrite, match=says):
            write(target)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_path_that_no_system_takes_is_refused() -> None:
    for path in ("\0", "a" * 5000):
        with pytest.raises(InputRefused, match="can't be opened"):
            mp.load(path)


def test_a_packed_nbmem_file_is_told_from_an_unsafe_pickle(tmp_path):
    import gzip

    Capture.build({}).save(tmp_path / "run.nbmem")
    (tmp_path / "run.nbmem.gz").write_bytes(gzip.compress((tmp_path / "run.nbmem").read_bytes()))
    with pytest.raises(InputRefused, match="gunzip") as refusal:
        mp.load(tmp_path / "run.nbmem.gz")
    assert "unsafe" not in str(refusal.value)
