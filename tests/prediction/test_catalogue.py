"""The GPU catalogue: what a row must hold, names as people write them, and that unmeasured numbers say so."""

from __future__ import annotations

import pytest

from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction import attention
from nbmemprof.prediction.catalogue import CATALOGUE, find, gpus, outside_of

MIB = 1 << 20


@pytest.mark.parametrize(
    ("written", "name"),
    [("h200", "H200"), ("NVIDIA H200", "H200"), ("A100", "A100-80GB"), ("nvidia a100-sxm4-40gb", "A100-40GB"), ("4090", "RTX 4090"), ("GeForce RTX 3060", "RTX 3060"), ("Tesla T4", "T4"), ("a6000", "RTX A6000")],
)
def test_a_gpu_is_found_as_people_write_it(written, name):
    assert find(written).name == name


def test_an_unknown_gpu_is_refused_with_those_that_are_known():
    with pytest.raises(NbmemprofError, match=r"no GPU 'GTX 99'.*H200.*T4"):
        find("GTX 99")


def test_every_name_and_title_finds_its_own_row():
    for gpu in CATALOGUE.values():
        assert find(gpu.name) is find(gpu.title) is gpu


def test_the_catalogue_goes_from_turing_to_blackwell():
    assert {g.generation for g in CATALOGUE.values()} == {"turing", "ampere", "ada", "hopper", "blackwell", "blackwell-rtx"}
    assert all((gpu.generation, "2.11") in attention.TABLE for gpu in CATALOGUE.values())


def test_what_was_not_measured_says_so_and_has_a_larger_error():
    for gpu in CATALOGUE.values():
        assert gpu.sources
        if gpu.name == "H200":
            assert gpu.capacity_plus_minus_bytes == 0
            assert gpu.outside.source.startswith("measured")
        else:
            assert gpu.capacity_plus_minus_bytes > 0
            assert gpu.outside.plus_minus > CATALOGUE["H200"].outside.plus_minus
            assert "not measured" in gpu.outside.source


def test_libraries_come_on_top_of_the_context_in_order():
    for gpu in CATALOGUE.values():
        steps = [getattr(gpu.outside, name) for name in ("context", "kernels", "blas", "second_blas", "cudnn", "fft", "solver")]
        assert steps == sorted(steps)
        assert steps[0] > 0


def test_another_cuda_version_has_a_larger_error():
    gpu = CATALOGUE["H200"]
    assert outside_of(gpu) is gpu.outside
    assert outside_of(gpu, 12).plus_minus > gpu.outside.plus_minus
    assert "CUDA 12 was not measured" in outside_of(gpu, 12).source


def test_cublas_takes_32_mib_from_hopper_on_and_8320_kib_before():
    assert {g.name: g.cublas_workspace_bytes for g in CATALOGUE.values() if g.name in ("H100", "B200", "A100-80GB", "T4")} == {
        "H100": 32 * MIB, "B200": 32 * MIB, "A100-80GB": 8_519_680, "T4": 8_519_680,
    }  # fmt: skip


def test_the_frame_has_a_row_a_gpu_by_capacity():
    frame = gpus()
    assert frame.height == len(CATALOGUE)
    assert frame["capacity_bytes"].is_sorted()
    assert frame.filter(gpu="H200")["capacity_bytes"].item() == 150_109_880_320
