"""Finding the library, and telling beforehand whether counters are locked."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbmemprof.errors import NbmemprofError
from nbmemprof.gpu import _cupti, _readiness

USER, ADMIN = "CapEff:\t0000000000000000\n", "CapEff:\t000001ffffffffff\n"


@pytest.fixture
def proc(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    def made(params, status):
        (tmp_path / "params").write_text(params)
        (tmp_path / "status").write_text(status)
        return str(tmp_path / "params"), str(tmp_path / "status")

    return made


@pytest.mark.parametrize(("only", "capabilities", "locked"), [(1, USER, True), (1, ADMIN, False), (0, USER, False)])
def test_counters_are_locked_for_those_without_the_right(proc, only, capabilities, locked):
    assert _readiness.is_locked(*proc(f"RmLogonRC: 1\nRmProfilingAdminOnly: {only}\n", capabilities)) is locked


def test_root_has_the_right(proc, monkeypatch):
    files = proc("RmProfilingAdminOnly: 1\n", USER)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert not _readiness.is_locked(*files)


def test_where_the_driver_does_not_tell_nothing_is_claimed(tmp_path):
    assert not _readiness.is_locked(str(tmp_path / "none"), str(tmp_path / "none"))


def test_what_stands_against_counting_is_told(proc, monkeypatch):
    files = proc("RmProfilingAdminOnly: 1\n", USER)
    monkeypatch.setattr(_cupti, "find_library", lambda: Path("libcupti.so.13"))
    assert "CAP_SYS_ADMIN" in _readiness.reason(*files)
    monkeypatch.setattr(_cupti, "find_library", lambda: None)
    assert "pip install" in _readiness.reason(*files)


def test_the_library_that_the_process_has_mapped_comes_first(tmp_path):
    maps = tmp_path / "maps"
    maps.write_text("7f0-7f1 r-xp 00000000 08:01 12 /lib/libc.so.6\n7f2-7f3 r-xp 00000000 08:01 13 /venv/nvidia/cu13/lib/libcupti.so.13\n")
    assert _cupti._mapped(str(maps)) == Path("/venv/nvidia/cu13/lib/libcupti.so.13")
    maps.write_text("7f0-7f1 r-xp 00000000 08:01 12 /lib/libcupti.so.note\n")
    assert _cupti._mapped(str(maps)) is None
    assert _cupti._mapped(str(tmp_path / "none")) is None


def test_without_a_library_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setattr(_cupti, "find_library", lambda: None)
    with pytest.raises(NbmemprofError, match="no libcupti was found .* pip install"):
        _cupti.open_library()


def test_a_library_that_is_none_is_told(tmp_path):
    (tmp_path / "libcupti.so.13").write_text("not a library")
    with pytest.raises(NbmemprofError, match="can't be loaded"):
        _cupti.open_library(tmp_path / "libcupti.so.13")


def test_a_library_without_the_range_profiler_is_told():
    with pytest.raises(NbmemprofError, match="older than CUDA 12.6"):
        _cupti.Cupti(object(), "libcupti.so.11")


def test_every_advice_is_one_line_with_the_call_and_its_result():
    for code in _cupti._ADVICE:
        said = _cupti.advice(code, "cuptiSomething", "CUPTI_ERROR")
        assert "\n" not in said
        assert said.endswith(f"(cuptiSomething: CUPTI error {code}, CUPTI_ERROR).")
        assert len(said) < 520
