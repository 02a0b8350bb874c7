"""IDX files: what is right is read exactly, what is damaged is refused by name."""

import gzip

import numpy as np
import pytest
from datasets_files import idx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gluon_parallel.datasets.mnist import read_idx
from gluon_parallel.errors import DatasetCorrupt

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("idx") / "file"


@given(
    values=arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=1) | st.tuples(*[st.integers(0, 5)] * 3))
)
@pytest.mark.parametrize("compress", [False, True])
def test_any_array_of_bytes_comes_back_as_it_was(path, values, compress):
    path.write_bytes(gzip.compress(idx(values)) if compress else idx(values))
    found = read_idx(path, num_dims=values.ndim)
    np.testing.assert_array_equal(found, values)
    assert found.dtype == np.uint8


@pytest.mark.parametrize("compress", [False, True])
def test_a_file_cut_off_anywhere_is_refused(path, compress):
    whole = gzip.compress(idx(IMAGES)) if compress else idx(IMAGES)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DatasetCorrupt, match=r"file: .*(cut off|starts with (nothing|00|1f))"):
            read_idx(path, num_dims=3)


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_in_a_compressed_file_is_never_read_as_other_images(path, position, bit):
    damaged = bytearray(gzip.compress(idx(IMAGES)))
    damaged[position % len(damaged)] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        found = read_idx(path, num_dims=3)
    except DatasetCorrupt:
        return
    np.testing.assert_array_equal(found, IMAGES)  # gzip's own time stamp and name do not matter


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (idx(IMAGES) + b"x", "cut off or too long: 25 bytes, where it states a shape of (2, 3, 4)"),
        (idx(IMAGES)[:-3], "cut off or too long: 21 bytes, where it states a shape of (2, 3, 4)"),
        (idx(IMAGES[0, 0]), "starts with 00 00 08 01 where an IDX file of this kind starts with 00 00 08 03"),
        (idx(IMAGES, type_code=0x0D), "starts with 00 00 0d 03"),
        (b"<!DOCTYPE html>", "starts with 3c 21 44 4f"),
        (b"", "starts with nothing"),
        (idx(IMAGES)[:7], "cut off within its header"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "0 bytes, where it states a shape of (4294967295, 4294967295, 4294967295)"),
    ],
)
def test_a_wrong_file_is_refused_by_what_is_wrong(path, content, words, compress):
    path.write_bytes(gzip.compress(content) if compress else content)
    with pytest.raises(DatasetCorrupt) as refusal:
        read_idx(path, num_dims=3)
    assert words in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_trailing_bytes_after_the_compressed_part_are_refused(path):
    path.write_bytes(gzip.compress(idx(IMAGES)) + b"garbage")
    with pytest.raises(DatasetCorrupt, match="gzip"):
        read_idx(path, num_dims=3)
