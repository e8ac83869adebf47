"""Device code without a GPU: every file compiles for every architecture that is used, quietly, and says how it is launched."""

from __future__ import annotations

import re

import nvrtc
import pytest
from support import ROOT

from nbmemprof.errors import NbmemprofError
from nbmemprof.gpu import _loader

ARCHITECTURES = (75, 80, 86, 89, 90, 100)
MACROS = {
    "bandwidth": [{"WIDTH": 4, "UNROLL": 8, "STREAM": 1}, {"WIDTH": 8, "UNROLL": 1, "STREAM": 0}, {"WIDTH": 16, "UNROLL": 2, "STREAM": 1}],
    "bank_conflicts": [{"WIDTH": 8}, {"WIDTH": 16}],
    "latency": [{"CACHED": 0}],
}
NAMES = re.compile(r'extern "C" __global__ void (\w+)\(')


@pytest.mark.cost(0.17)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", _loader.names())
def test_device_code_compiles_without_a_warning_and_has_its_kernels(name, architecture):
    text = _loader.source(name)
    code, log = nvrtc.compiled(text, [*_loader.options(), f"-arch=sm_{architecture}"])
    assert log == ""
    for kernel in NAMES.findall(text):
        assert f".text.{kernel}".encode() in code


@pytest.mark.cost(0.3)
@pytest.mark.parametrize(("name", "macros"), [(name, macros) for name, several in MACROS.items() for macros in several])
def test_device_code_compiles_with_each_value_of_its_macros(name, macros):
    code, log = nvrtc.compiled(_loader.source(name), [*_loader.options(macros), "-arch=sm_90"])
    assert code
    assert log == ""


def test_device_code_stands_alone_and_begins_with_its_launch_contract():
    for name in _loader.names():
        text = _loader.source(name)
        head = text.split("\n\n")[0]
        assert head.startswith("// "), name
        assert "Launch:" in head, name
        assert "#include" not in text, name
        assert NAMES.findall(text), name


@pytest.mark.parametrize("kind", ["float", "double"])
def test_the_public_kernels_that_ours_are_held_against_compile(kind):
    code, log = nvrtc.compiled((ROOT / "tests" / "gpu" / "reference_kernels.cu").read_text(), [f"-DELEMENT={kind}", "-arch=sm_90"])
    assert (code != b"", log) == (True, "")


def test_the_compiler_sees_a_mistake():
    code, log = nvrtc.compiled('extern "C" __global__ void k(int* a) { a[0] = missing; }', ["-arch=sm_90"])
    assert code == b""
    assert "missing" in log


def test_wide_elements_are_moved_by_wide_instructions():
    for width, suffix in ((4, ""), (8, "v2."), (16, "v4.")):
        code, _ = nvrtc.compiled(_loader.source("bandwidth"), [*_loader.options({"WIDTH": width, "UNROLL": 4}), "-arch=compute_90"])
        body = code.decode().partition(".entry copy(")[2].partition(".entry ")[0]
        assert len(re.findall(rf"ld\.global\.nc\.{suffix}[ub]32", body)) == 4 + 1  # four at once, one in the last, incomplete tile
        assert len(re.findall(rf"st\.global\.{suffix}[ub]32", body)) == 4 + 1


def test_a_name_that_is_not_there_is_answered_with_those_that_are():
    with pytest.raises(NbmemprofError, match=r"No device code named 'bandwith'. There are: access_patterns, bandwidth"):
        _loader.source("bandwith")


def test_an_installation_without_device_code_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(_loader, "_FOLDERS", (tmp_path,))
    with pytest.raises(NbmemprofError, match="incomplete"):
        _loader.folder()


def test_a_wheel_s_own_folder_comes_first(tmp_path, monkeypatch):
    (tmp_path / "only.cu").write_text("// Launch: none\n")
    monkeypatch.setattr(_loader, "_FOLDERS", (tmp_path, *_loader._FOLDERS))
    assert _loader.names() == ["only"]


def test_running_device_code_without_cupy_names_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NbmemprofError, match=r"nbmemprof\[cupy\]"):
        _loader.kernel("touch", "touch")
