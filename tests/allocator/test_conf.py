"""Configurations are read as torch reads them: values, traps and refusals, by version."""

from __future__ import annotations

import pytest

import nbmemprof as mp
from nbmemprof.allocator import ConfError, Device, parse
from nbmemprof.allocator.versions import rules_of
from nbmemprof.errors import NbmemprofError

pytestmark = pytest.mark.cost(0.02)  # a few calls each

MIB = 1 << 20


def test_nothing_set_is_torchs_defaults():
    made = parse("")
    assert (made.expandable_segments, made.max_split_size, made.max_non_split_rounding, made.large_segment_size) == (False, None, 20 * MIB, 20 * MIB)
    assert (made.garbage_collection_threshold, set(made.roundup_power2_divisions), made.backend) == (0.0, {0}, "native")
    assert parse(None) == made


def test_every_key_of_device_memory():
    made = parse(
        "expandable_segments:True, max_split_size_mb:128,max_non_split_rounding_mb:64,roundup_power2_divisions:8,garbage_collection_threshold:0.8,"
        "per_process_memory_fraction:0.5,graph_capture_record_stream_reuse:True,release_lock_on_cudamalloc:True,backend:native"
    )
    assert made.expandable_segments
    assert (made.max_split_size, made.max_non_split_rounding) == (128 * MIB, 64 * MIB)
    assert made.roundup_power2_divisions == (8,) * 16
    assert (made.garbage_collection_threshold, made.per_process_memory_fraction) == (0.8, 0.5)
    assert made.graph_capture_record_stream_reuse
    assert made.release_lock_on_cudamalloc


def test_blanks_are_dropped_and_a_comma_at_the_end_is_no_matter():
    assert parse(" max_split_size_mb : 30 ,").max_split_size == 30 * MIB


def test_host_keys_are_legal_and_change_nothing_here():
    made = parse("pinned_use_background_threads:True,pinned_num_register_threads:8")
    assert made.others == {"pinned_use_background_threads": "True", "pinned_num_register_threads": "8"}


def test_the_list_of_divisions_fills_from_its_first_entry_down_and_leaves_gaps_at_zero():
    assert parse("roundup_power2_divisions:[4:2,64:4]").roundup_power2_divisions == (2, 2, 2, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize(("torch", "bucket"), [("2.8", 8), ("2.9", 4), ("2.11", 4)])
def test_what_greater_than_does_to_the_last_listed_bucket(torch, bucket):
    assert parse("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", torch).roundup_power2_divisions[10] == bucket


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_split_size_mb:19", "too small, must be >= 20"),
        ("max_non_split_rounding_mb:19", "max_non_split_rounding_mb too small, must be >= 20"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "must be >= 40"),  # read first, wherever it stands
        ("max_split_size_mb:x", "stoull"),
        ("max_split_size_mb:99999999999999999999", "out of range"),
        ("max_split_size_mb", "missing"),
        ("large_segment_size_mb:10", "must be > 10 MB"),
        ("garbage_collection_threshold:1.0", r"set it in \(0.0, 1.0\)"),
        ("garbage_collection_threshold:0", r"set it in \(0.0, 1.0\)"),
        ("per_process_memory_fraction:1.5", r"set it in \[0.0, 1.0\]"),
        ("expandable_segments:true", "Expected 'True' or 'False'"),
        ("roundup_power2_divisions:3", "power of 2"),
        ("roundup_power2_divisions:0", "power of 2"),
        ("roundup_power2_divisions:[256:1,>:3]", "power of 2 or 0"),
        ("roundup_power2_divisions:[300:1]", "intervals have to be power of 2"),
        ("roundup_power2_divisions:[256:1", "missing"),
        ("backend:foo", "Unknown allocator backend"),
        ("foo:1", "Unrecognized key 'foo'"),
        ("throw_on_cudamalloc_oom:True", "Unrecognized key"),  # 2.12 and later
        ("expandable_segments_reserve:0.5", "Unrecognized key"),  # after 2.13
    ],
)
def test_what_torch_211_refuses(text, words):
    with pytest.raises(ConfError, match=words) as caught:
        parse(text)
    assert isinstance(caught.value, ValueError)
    assert "torch 2.11 refuses" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_split_size_mb:20", "must be > 20"),
        ("garbage_collection_threshold:1.5", "too big"),
        ("garbage_collection_threshold:-1", "too small"),
        ("expandable_segments:true", "Expected a single True/False argument"),
        ("foo:1", "Unrecognized CachingAllocator option: foo"),
        ("large_segment_size_mb:40", "Unrecognized CachingAllocator option"),
        ("per_process_memory_fraction:0.5", "Unrecognized CachingAllocator option"),
        ("max_split_size_mb=30", "Unrecognized"),
        ("max_split_size_mb,30", "expected :"),
    ],
)
def test_what_torch_28_refuses(text, words):
    with pytest.raises(ConfError, match=words):
        parse(text, "2.8")


def test_numbers_are_read_as_far_as_they_are_numbers():
    assert parse("max_split_size_mb:30.9").max_split_size == 30 * MIB
    assert parse("garbage_collection_threshold:0.5x").garbage_collection_threshold == 0.5


def test_keys_that_later_versions_know():
    assert parse("throw_on_cudamalloc_oom:True", "2.13").throw_on_cudamalloc_oom
    assert parse("expandable_segments_reserve:40G", "2.15").expandable_reserve == 40 << 30
    assert parse("expandable_segments_reserve:0.5", "2.15").expandable_reserve == 0.5
    assert parse("expandable_segments_reserve:nonsense", "2.15").expandable_reserve is None  # torch warns and ignores it


def test_a_change_at_run_time_resets_three_options_and_keeps_the_others():
    before = parse("expandable_segments:True,max_split_size_mb:128,roundup_power2_divisions:4,garbage_collection_threshold:0.5,large_segment_size_mb:40")
    after = parse("max_non_split_rounding_mb:64", before=before)
    assert (after.max_split_size, after.garbage_collection_threshold, set(after.roundup_power2_divisions)) == (None, 0.0, {0})
    assert (after.expandable_segments, after.large_segment_size) == (True, 40 * MIB)


@pytest.mark.cost(0.6)
@pytest.mark.parametrize("text", ["max_split_size_mb:20", "max_split_size_mb:19", "roundup_power2_divisions:[256:1,>:4]", "garbage_collection_threshold:1.0", "expandable_segments:yes"])
def test_the_torch_that_is_installed_agrees(text):
    """The common parser is in torch's CPU build too."""
    torch = pytest.importorskip("torch")
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:
        pytest.skip("this torch has no such function")

    def answer(read):
        try:
            read(text)
        except Exception:
            return "refused"
        return "read"

    try:
        assert answer(setter) == answer(lambda t: parse(t, torch.__version__))
    finally:
        setter("expandable_segments:False")


def test_versions_are_read_and_named_where_they_are_not():
    assert rules_of("2.13.0+cu130").torch == (2, 13)
    assert rules_of(None).torch == (2, 11)
    with pytest.raises(NbmemprofError, match="not a torch version"):
        rules_of("latest")


def test_the_drivers_own_pool_is_not_modelled():
    with pytest.raises(NbmemprofError, match="cudaMallocAsync"):
        Device("backend:cudaMallocAsync")
    device = Device()
    device.free(device.malloc(30 << 20))
    capture = mp.load(device.snapshot())
    for ask in (mp.what_if, mp.replay):
        with pytest.raises(NbmemprofError, match="only torch's native allocator is modelled"):
            ask(capture, "backend:cudaMallocAsync")
    capture.meta["conf"] = "backend:cudaMallocAsync"
    assert "which is not modelled" in mp.advise(capture).filter(rule="settings")["finding"][0]


def test_what_is_no_text_is_no_configuration():
    device = Device()
    device.free(device.malloc(30 << 20))
    for wrong in (3, [None]):
        with pytest.raises(NbmemprofError, match="is no configuration"):
            mp.what_if(mp.load(device.snapshot()), wrong)
