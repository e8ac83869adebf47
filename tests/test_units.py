"""Bytes and time, read and printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbmemprof.errors import NbmemprofError
from nbmemprof.units import format_bytes, format_count, format_time_us, parse_bytes, share_units, unit_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8G", 8 << 30),
        ("80GB", 80 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5KiB", 1536),
        ("17", 17),
        (17, 17),
        (2.0, 2),
        ("1e3", 1000),
        ("0", 0),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8XiB", "-1", -1, "8GiB extra", "nan", float("nan"), float("inf"), True, "1e999GiB"])
def test_what_is_no_size_is_refused_with_the_value(text: object) -> None:
    with pytest.raises(NbmemprofError, match=r"size"):
        parse_bytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1 MiB"),
        (15 << 30, "15 GiB"),
        (-2048, "−2 KiB"),
        (None, "unknown"),
        (float("nan"), "unknown"),
    ],
)
def test_sizes_are_printed(size: float | None, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(0, 1 << 60))
def test_a_printed_size_reads_back_within_its_digits(size: int) -> None:
    assert abs(parse_bytes(format_bytes(size, digits=3)) - size) <= max(1, size / 1000)


def test_counts_and_times_are_printed() -> None:
    assert format_count(1234567) == "1\u202f234\u202f567"
    assert [format_time_us(t) for t in (3.0, 1500, 2.5e6, None)] == ["3 µs", "1.5 ms", "2.5 s", "unknown"]


@pytest.mark.parametrize(
    ("texts", "before", "shown"),
    [
        (["4 KiB", "3 MiB", "2 MiB"], "", ["4 KiB", "3 MiB", "2"]),
        (["1 MiB", "1020.9 KiB", "1 MiB"], "", ["1 MiB", "1020.9 KiB", "1 MiB"]),
        (["2 MiB", "1.5 MiB"], "512 B", ["2 MiB", "1.5"]),
        (["2 MiB", "1.5 MiB", "512 KiB"], "3 MiB", ["2", "1.5 MiB", "512 KiB"]),
        (["4 MiB", "unknown", "2 MiB"], "", ["4 MiB", "unknown", "2 MiB"]),
        ([], "1 MiB", []),
    ],
)
def test_a_unit_goes_only_where_its_neighbours_have_the_same(texts: list[str], before: str, shown: list[str]) -> None:
    assert share_units(texts, before) == shown


@given(st.lists(st.integers(0, 60).map(lambda power: 1 << power), max_size=6), st.integers(0, 60).map(lambda power: 1 << power))
def test_a_left_out_unit_is_read_back_from_either_side(sizes: list[int], before: int) -> None:
    texts = [format_bytes(size) for size in sizes]
    line = [format_bytes(before), *share_units(texts, format_bytes(before))]
    for number, whole in enumerate(texts, start=1):
        left = next(filter(None, map(unit_of, reversed(line[: number + 1]))))
        right = next(filter(None, map(unit_of, line[number:])), left)
        value = line[number].partition(" ")[0]
        assert f"{value} {left}" == whole == f"{value} {right}"
