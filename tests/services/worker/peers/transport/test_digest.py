"""The digest shows any fault in the bytes, however they are cut into buffers."""

from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.peers.transport.digest import (
    SLICE_BYTES,
    PayloadDigest,
    digest,
    sizes_as_slices,
    slices,
    sums_in_numpy,
)

_ROW = 4096
_LARGE = np.random.default_rng(5).integers(0, 256, 3 * SLICE_BYTES + 12_345, dtype=np.uint8)


def _of(array: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> bytes:
    return digest([array.data])


def _swap(array: "np.ndarray[tuple[int], np.dtype[np.uint8]]", one: int, other: int, size: int) -> None:
    kept = array[one : one + size].copy()
    array[one : one + size] = array[other : other + size]
    array[other : other + size] = kept


FAULTS: dict[str, Callable[["np.ndarray[tuple[int], np.dtype[np.uint8]]"], object]] = {
    "a page of zeros": lambda a: a[_ROW : 2 * _ROW].fill(0),
    "a page twice": lambda a: np.copyto(a[_ROW : 2 * _ROW], a[:_ROW]),
    "two pages swapped": lambda a: _swap(a, 0, 7 * _ROW, _ROW),
    "two words swapped in one row": lambda a: _swap(a, 16, 800, 8),
    "two slices swapped": lambda a: _swap(a, 0, SLICE_BYTES, SLICE_BYTES),
    "two bytes exchanged": lambda a: _swap(a, 10, 11, 1),
    "one bit in the rest": lambda a: a.__setitem__(-1, a[-1] ^ 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shows(fault: str) -> None:
    broken = _LARGE.copy()
    FAULTS[fault](broken)
    assert not np.array_equal(broken, _LARGE)
    assert _of(broken) != _of(_LARGE)


@given(st.integers(0, _LARGE.size - 1), st.integers(1, 255))
def test_shows_any_single_byte(place: int, flip: int) -> None:
    broken = _LARGE.copy()
    broken[place] ^= flip
    assert _of(broken) != _of(_LARGE)


@pytest.mark.parametrize("bit", range(64))
def test_shows_every_bit_of_a_word_wherever_it_is(bit: int) -> None:
    for word in (0, 511, 512, 1250, 2000, 131_071, 131_072):
        broken = _LARGE.copy()
        broken[8 * word + bit // 8] ^= 1 << bit % 8
        assert _of(broken) != _of(_LARGE)


@given(st.binary(max_size=100), st.integers(0, 99), st.integers(1, 255))
def test_shows_any_byte_of_a_short_payload(data: bytes, place: int, flip: int) -> None:
    broken = bytearray(data)
    if place < len(broken):
        broken[place] ^= flip
        assert digest([memoryview(data)]) != digest([memoryview(broken)])


@given(st.lists(st.integers(0, 3 * SLICE_BYTES // 2), max_size=5))
def test_buffers_and_sizes_are_cut_alike(sizes: list[int]) -> None:
    buffers = [memoryview(bytes(size)) for size in sizes]
    scratch = memoryview(bytearray(SLICE_BYTES))
    cut = [[view.nbytes for view in group] for group in slices(buffers)]
    assert cut == [[view.nbytes for view in group] for group in sizes_as_slices(sizes, scratch)]
    assert sum(map(sum, cut)) == sum(sizes)
    assert all(0 < sum(group) <= SLICE_BYTES for group in cut)


@pytest.mark.parametrize("rows", [4, 5, 63, 64])
def test_the_library_and_numpy_agree(rows: int) -> None:
    words = _LARGE[: rows * 8192].view(np.uint64)
    view = words.view(np.uint8).data
    by_row, by_column = sums_in_numpy(words, rows)
    made = PayloadDigest()
    made.update([view])
    other = PayloadDigest()
    with mock.patch("services.worker.peers.transport.digest._sums", return_value=sums_in_numpy):
        other.update([view])
    assert made.value == other.value and by_row != by_column
