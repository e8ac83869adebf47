"""``%%memprof_cuda``: its line, its arguments, and what it says where nothing can run."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from counters.fake_cupti import FakeCupti, machine
from counters.test_cell import STRIDED
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import nbmemprof
from nbmemprof import cuda_cell
from nbmemprof.errors import FlagError, NbmemprofError, NotRecording
from nbmemprof.gpu import _context, _cupti

SOURCE = """
extern "C" __global__ void scale(const float* __restrict__ x, float* y, int n, float by) {
    __shared__ float part[1024];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    part[threadIdx.x * 32 % 1024] = by;
    if (i < n) y[i] = x[i * 32];
}
"""


class Array(np.ndarray):
    """An array that says that it lies on the GPU."""

    @property
    def __cuda_array_interface__(self):
        return {}


def on_gpu(count, dtype="float32"):
    return np.zeros(count, dtype).view(Array)


@pytest.fixture
def launched(monkeypatch):
    """A CuPy and a libcupti that answer; what was launched."""
    calls, fake = [], FakeCupti([STRIDED])
    parts = machine(fake)

    def function(name):
        def launch(grid, block, arguments, shared_mem):
            calls.append((name, grid, block, arguments, shared_mem))
            fake.launch(name, (*grid, 1, 1)[:3], (*block, 1, 1)[:3])

        return launch

    class CompileException(Exception):
        pass

    def module(code, options):
        if "oops" in code:
            raise CompileException('error: identifier "oops" is undefined')
        return SimpleNamespace(get_function=function)

    cupy = SimpleNamespace(RawModule=module, asarray=lambda value: value, cuda=SimpleNamespace(compiler=SimpleNamespace(CompileException=CompileException)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(_cupti, "open_library", lambda: parts["cupti"])
    monkeypatch.setattr(_context, "current", lambda: parts["context"])
    return calls


def test_the_kernel_is_launched_over_the_first_array_and_counted(launched):
    names = {"x": on_gpu(1000), "y": on_gpu(1000), "n": 1000}
    counted = cuda_cell.run("scale(x, y, n, 2) --out told", SOURCE, names)
    ((name, grid, block, arguments, shared),) = launched
    assert (name, grid, block, shared) == ("scale", (4,), (256,), 0)
    assert [type(value) for value in arguments[2:]] == [np.int32, np.float32]  # as the kernel's parameters are
    assert counted["name"].to_list() == ["scale"]
    assert names["told"] is counted


def test_grid_block_and_shared_memory_are_expressions(launched):
    names = {"x": on_gpu(8), "n": 8}
    cuda_cell.run("scale(x, x, n, 1.5) --grid '(n, 2)' --block '(32, 8)' --shared 4*n", SOURCE, names)
    assert launched[0][1:3] == ((8, 2), (32, 8))
    assert launched[0][4] == 32


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        ("scale", FlagError, "doesn't begin with a call"),
        ("scale(x, y=2)", FlagError, "doesn't begin with a call"),
        ("scale(x, y, n, 1) --blok 3", FlagError, "Did you mean '--block'"),
        ("scale(x, y, missing, 1)", FlagError, "the argument missing can't be evaluated"),
        ("scale(x, y, n, 1) --grid 1.5", FlagError, "--grid can't be 1.5"),
        ("scal(x, y, n, 1)", NbmemprofError, "no kernel 'scal' in this cell. Did you mean 'scale'"),
        ("scale(x, y, n)", NbmemprofError, "4 parameters .*, and 3 arguments"),
        ("scale(x, wide, n, 1)", NbmemprofError, "array of float64, and the kernel wants float"),
        ("scale(host, y, n, 1)", NbmemprofError, "does not lie on the GPU"),
        ("scale(x, y, 'n', 1)", NbmemprofError, "n can't be 'n': the kernel wants int"),
    ],
)
def test_what_does_not_fit_is_told_and_nothing_is_launched(launched, line, kind, words):
    names = {"x": on_gpu(8), "y": on_gpu(8), "wide": on_gpu(8, "float64"), "host": [1.0], "n": 8}
    with pytest.raises(kind, match=words):
        cuda_cell.run(line, SOURCE, names)
    assert launched == []


def test_the_compilers_words_are_passed_on(launched):
    with pytest.raises(NbmemprofError, match='doesn\'t compile:\nerror: identifier "oops"'):
        cuda_cell.run("scale(x, x, 8, 1)", SOURCE + "oops", {"x": on_gpu(8)})


def test_without_a_gpu_the_model_says_what_each_line_would_cost(monkeypatch, capsys):
    def none():
        raise NotRecording("no NVIDIA driver")

    monkeypatch.setattr(_context, "current", none)
    assert cuda_cell.run("scale(x, y, n, 1)", SOURCE, {}) is None
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "no NVIDIA driver"
    assert said[1] == "Modelled, not measured:"
    assert "line 5: store of part, stride 32: 32 wavefronts a warp where 1 would do" in said
    assert "line 6: load of x, stride 32: 32 sectors a warp where 4 would do" in said
    assert "line 6: store of y, stride 1: 4 sectors a warp where 4 would do" in said


def test_the_magic_comes_and_goes_with_the_extension(launched):
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    nbmemprof.load_ipython_extension(shell)
    shell.user_ns.update(x=on_gpu(8), n=8)
    with capture_output():
        result = shell.run_cell(f"%%memprof_cuda scale(x, x, n, 1)\n{SOURCE}")
    assert result.result["name"].to_list() == ["scale"]
    nbmemprof.unload_ipython_extension(shell)
    assert "memprof_cuda" not in shell.magics_manager.magics["cell"]
    InteractiveShell.clear_instance()
