"""CIFAR-10 in both published versions, packed and unpacked; damaged or malicious files are refused."""

import gzip
import io
import os
import pickle
import resource
import tarfile
import warnings

import numpy as np
import pytest
from datasets_files import cifar_batches, cifar_binary, cifar_python, tar_gz
from hypothesis import given
from hypothesis import strategies as st

from gluon_parallel import datasets
from gluon_parallel.datasets.cifar import read_pickled
from gluon_parallel.errors import DatasetCorrupt


def load(folder):
    return datasets.load("cifar10", root=folder, download=False)


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


LAYOUTS = {
    "binary archive": lambda folder, batches: write(folder, {"cifar-10-binary.tar.gz": tar_gz(cifar_binary(batches))}),
    "binary folder": lambda folder, batches: write(folder / "cifar-10-batches-bin", cifar_binary(batches)),
    "binary files": lambda folder, batches: write(folder, cifar_binary(batches)),
    "python archive": lambda folder, batches: write(folder, {"cifar-10-python.tar.gz": tar_gz(cifar_python(batches))}),
    "python folder": lambda folder, batches: write(folder / "cifar-10-batches-py", cifar_python(batches)),
    "python files": lambda folder, batches: write(folder, cifar_python(batches)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_images_and_labels_are_those_in_the_files(tmp_path, layout):
    batches = cifar_batches()
    LAYOUTS[layout](tmp_path / "cifar10", batches)
    data = load(tmp_path)
    train = [batches[f"data_batch_{number}"] for number in range(1, 6)]
    images = np.concatenate([images for images, _ in train]).astype(np.float64) / 255
    np.testing.assert_allclose(data.train.images, images, rtol=1e-7, atol=1e-9)  # one rounding to float32
    np.testing.assert_array_equal(data.train.labels, np.concatenate([labels for _, labels in train]))
    images = batches["test_batch"][0].astype(np.float64) / 255
    np.testing.assert_allclose(data.test.images, images, rtol=1e-7, atol=1e-9)
    np.testing.assert_array_equal(data.test.labels, batches["test_batch"][1])
    assert data.train.images.dtype == data.test.images.dtype == np.float32
    assert data.num_classes == len(data.classes) == 10


def test_files_are_found_in_an_archive_in_any_order(tmp_path):
    files = cifar_binary(cifar_batches())
    write(tmp_path / "cifar10", {"cifar-10-binary.tar.gz": tar_gz(dict(reversed(files.items())))})
    found = load(tmp_path)
    LAYOUTS["binary folder"](tmp_path / "cifar10", cifar_batches())
    np.testing.assert_array_equal(found.train.labels, load(tmp_path).train.labels)


def test_a_record_that_is_cut_off_is_refused_by_file_and_length(tmp_path):
    files = cifar_binary(cifar_batches())
    files["data_batch_3.bin"] = files["data_batch_3.bin"][:-1]
    write(tmp_path / "cifar10", files)
    with pytest.raises(DatasetCorrupt, match=r"data_batch_3.bin: 3072 bytes are no multiple of the 3073"):
        load(tmp_path)


def test_a_label_that_is_no_class_is_refused(tmp_path):
    batches = cifar_batches()
    batches["data_batch_2"][1][1] = 10
    LAYOUTS["binary files"](tmp_path / "cifar10", batches)
    with pytest.raises(DatasetCorrupt, match=r"label 10 of image 3 is none of the 10 classes 0..9"):
        load(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    files = cifar_binary(cifar_batches())
    del files["data_batch_4.bin"], files["test_batch.bin"]
    write(tmp_path / "cifar10", {"cifar-10-binary.tar.gz": tar_gz(files)})
    with pytest.raises(DatasetCorrupt, match=r"data_batch_4, test_batch .* not found"):
        load(tmp_path)


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_an_archive_that_is_cut_off_is_refused(tmp_path, keep):
    whole = tar_gz(cifar_binary(cifar_batches()))
    write(tmp_path / "cifar10", {"cifar-10-binary.tar.gz": whole[: int(keep * len(whole))]})
    with pytest.raises(DatasetCorrupt, match=r"cifar-10-binary.tar.gz"):
        load(tmp_path)


def test_an_archive_with_a_wrong_gzip_checksum_is_refused(tmp_path):
    whole = bytearray(tar_gz(cifar_binary(cifar_batches())))
    whole[-8] ^= 1  # the checksum stands in the last eight bytes, before the length
    write(tmp_path / "cifar10", {"cifar-10-binary.tar.gz": bytes(whole)})
    with pytest.raises(DatasetCorrupt, match="CRC"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"<html>", gzip.compress(b"<html>" * 1000)], ids=["plain", "compressed"])
def test_what_is_no_archive_is_refused(tmp_path, content):
    write(tmp_path / "cifar10", {"cifar-10-binary.tar.gz": content})
    with pytest.raises(DatasetCorrupt):
        load(tmp_path)


def test_an_archive_writes_nothing_and_follows_no_links(tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(3073))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        link = tarfile.TarInfo("data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        archive.addfile(link)
        outside = tarfile.TarInfo("../../outside/data_batch_2.bin")
        outside.size = 3073
        archive.addfile(outside, io.BytesIO(bytes(3073)))
    write(tmp_path / "cifar10", {"cifar-10-binary.tar.gz": buffer.getvalue()})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DatasetCorrupt, match="data_batch_1, data_batch_3"):
        load(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_archive_that_claims_to_be_huge_is_refused_before_it_is_unpacked(tmp_path):
    huge = tarfile.TarInfo("data_batch_1.bin")
    huge.size = 2**40
    write(tmp_path / "cifar10", {"cifar-10-binary.tar.gz": gzip.compress(huge.tobuf() + bytes(1024))})
    with pytest.raises(DatasetCorrupt, match="claims 1099511627776 bytes"):
        load(tmp_path)


def test_the_pickles_that_these_tests_write_are_what_numpy_itself_reads():
    images, labels = cifar_batches()["data_batch_2"]
    content = cifar_python({"a": (images, labels)})["a"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy 2 points out that it has moved what these files name
        batch = pickle.loads(content, encoding="bytes")
    np.testing.assert_array_equal(batch[b"data"], images.reshape(-1, 3072))
    assert batch[b"labels"] == labels.tolist()


def test_a_pickle_that_numbers_what_it_keeps_very_high_does_not_fill_the_memory():
    jump = b"\x80\x02}r\xff\xff\xff\xff."  # keeps an empty dictionary under number 4294967295
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DatasetCorrupt, match="KeyError"):
        read_pickled(jump, "here")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kB


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("made by a pickle",)


def test_a_pickle_that_calls_something_else_is_refused_and_nothing_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = pickle.dumps({b"data": Malicious(), b"labels": [0]}, protocol=3)
    with pytest.raises(DatasetCorrupt, match=r"it wants to call (posix|os|nt).mkdir"):
        read_pickled(content, "here")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ([1, 2], "TypeError"),
        ({b"labels": [1]}, "KeyError"),
        ({b"data": b"bytes", b"labels": [1]}, "has no attribute 'dtype'"),
    ],
)
def test_another_pickle_is_refused_by_what_is_wrong_with_it(batch, words):
    with pytest.raises(DatasetCorrupt, match=words):
        read_pickled(pickle.dumps(batch, protocol=3), "here")


@pytest.mark.parametrize("labels", [[300, 0], [[1], [2]], ["cat", "dog"], [-1, 0], [0.5, 1.0]])
def test_labels_in_a_pickle_that_are_no_small_integers_are_refused(labels):
    ((images, _),) = [cifar_batches(sizes=(2,))["data_batch_1"]]
    good = cifar_python({"a": (images, np.array([0, 1], np.uint8))})["a"]
    start = good.index(b"](")
    stop = good.index(b"eU", start) + 1
    listed = pickle.dumps(labels, protocol=3)[2:-1]  # without its first two bytes and the last: PROTO 3 and STOP
    with pytest.raises(DatasetCorrupt, match="labels"):
        read_pickled(good[:start] + listed + good[stop:], "here")


@given(length=st.integers(0, 10**6), position=st.integers(0, 10**6), value=st.integers(0, 255))
def test_a_damaged_pickle_is_refused_or_has_as_many_labels_as_it_says(length, position, value):
    good = cifar_python(cifar_batches(sizes=(1,)))["data_batch_1"]
    damaged = bytearray(good[: length % len(good)] if length % 2 else good)
    if damaged:
        damaged[position % len(damaged)] = value
    try:
        images, labels = read_pickled(bytes(damaged), "here")
    except DatasetCorrupt:
        return
    assert images.dtype == labels.dtype == np.uint8
    assert images.shape[1:] == (3072,)
