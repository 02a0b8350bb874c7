"""load(name, root): which folder is read, which file is missing, what does not belong together."""

import gzip

import numpy as np
import pytest
import requests
from datasets_files import idx, idx_parts, write_idx_set

from gluon_parallel import datasets
from gluon_parallel.datasets import published
from gluon_parallel.errors import DatasetCorrupt, DatasetUnavailable


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise requests.ConnectionError(ValueError("this test has no network"))

    monkeypatch.setattr(requests, "get", refuse)


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("compress", [True, False])
def test_images_and_labels_are_those_in_the_files(tmp_path, name, compress):
    parts = idx_parts()
    write_idx_set(tmp_path / name, parts, compress)
    data = datasets.load(name, root=tmp_path)
    for part, (images, labels) in ((data.train, parts["train"]), (data.test, parts["t10k"])):
        # one rounding to float32
        np.testing.assert_allclose(part.images[:, 0], images.astype(np.float64) / 255, rtol=1e-7, atol=1e-9)
        np.testing.assert_array_equal(part.labels, labels)
        assert part.images.dtype == np.float32
        assert part.labels.dtype == np.int32
        assert part.images.shape == (len(labels), 1, 28, 28)
    assert (data.name, data.num_classes, len(data.classes)) == (name, 10, 10)


def test_root_may_be_the_folder_of_all_data_sets_or_the_data_sets_own(tmp_path):
    write_idx_set(tmp_path / "fashion-mnist", idx_parts(seed=1))
    write_idx_set(tmp_path / "all" / "fashion_mnist", idx_parts(seed=2))
    own = datasets.load("fashion_mnist", root=tmp_path / "fashion-mnist")
    among_all = datasets.load("fashion_mnist", root=str(tmp_path / "all"))
    np.testing.assert_array_equal(own.train.labels, idx_parts(seed=1)["train"][1])
    np.testing.assert_array_equal(among_all.train.labels, idx_parts(seed=2)["train"][1])


def test_without_root_the_environment_variable_names_the_folder_and_else_it_is_in_the_home(tmp_path, monkeypatch):
    write_idx_set(tmp_path / "variable" / "mnist", idx_parts(seed=1))
    write_idx_set(tmp_path / ".gluon_parallel" / "datasets" / "mnist", idx_parts(seed=2))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GLUON_PARALLEL_DATA", raising=False)
    np.testing.assert_array_equal(datasets.load("mnist").train.labels, idx_parts(seed=2)["train"][1])
    monkeypatch.setenv("GLUON_PARALLEL_DATA", "~/variable")
    np.testing.assert_array_equal(datasets.load("mnist").train.labels, idx_parts(seed=1)["train"][1])


def test_an_unknown_data_set_gives_the_list_of_those_there_are():
    with pytest.raises(DatasetUnavailable, match="no data set 'imagenet'") as refusal:
        datasets.load("imagenet")
    assert all(repr(name) in str(refusal.value) for name in datasets.NAMES)
    assert set(datasets.NAMES) == {"digits", "fashion_mnist", "mnist", "cifar10"}


@pytest.mark.parametrize("download", [True, False])
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mnist", "train-images-idx3-ubyte.gz"),
        ("fashion_mnist", "train-images-idx3-ubyte.gz"),
        ("cifar10", "cifar-10-binary.tar.gz"),
    ],
)
def test_offline_one_sentence_names_the_file_the_folder_and_the_embedded_data_set(tmp_path, name, file, download):
    with pytest.raises(DatasetUnavailable) as refusal:
        datasets.load(name, root=tmp_path, download=download)
    sentence = str(refusal.value)
    assert sentence.startswith(f"{name}: {file} is not in {tmp_path / name}, and ")
    assert "root=" in sentence
    assert "GLUON_PARALLEL_DATA" in sentence
    assert '"digits"' in sentence
    assert sentence.count("no connection") == (3 if download else 0)
    assert "\n" not in sentence
    assert ". " not in sentence, "one sentence"


def test_a_missing_one_of_four_files_is_named(tmp_path):
    write_idx_set(tmp_path / "mnist", idx_parts())
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DatasetUnavailable, match=r"t10k-labels-idx1-ubyte.gz is not in"):
        datasets.load("mnist", root=tmp_path)


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DatasetUnavailable, match="could not be downloaded there .*(exists|directory)"):
        datasets.load("mnist", root=tmp_path / "file")


def test_images_and_labels_of_different_number_are_refused(tmp_path):
    parts = idx_parts()
    parts["train"] = parts["train"][0], parts["train"][1][:-1]
    write_idx_set(tmp_path / "mnist", parts)
    with pytest.raises(DatasetCorrupt, match="5 images but 4 labels"):
        datasets.load("mnist", root=tmp_path)


def test_a_label_that_is_no_class_is_refused(tmp_path):
    parts = idx_parts()
    parts["t10k"][1][2] = 200
    write_idx_set(tmp_path / "mnist", parts)
    with pytest.raises(DatasetCorrupt, match=r"t10k-labels.*label 200 of image 2 is none of the 10 classes"):
        datasets.load("mnist", root=tmp_path)


def test_a_data_set_without_images_is_refused(tmp_path):
    write_idx_set(tmp_path / "mnist", idx_parts(test=0))
    with pytest.raises(DatasetCorrupt, match="no images at all"):
        datasets.load("mnist", root=tmp_path)


def test_images_of_another_size_are_refused(tmp_path):
    write_idx_set(tmp_path / "mnist", idx_parts())
    small = idx(np.zeros((5, 8, 9), np.uint8))
    (tmp_path / "mnist" / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(small))
    with pytest.raises(DatasetCorrupt, match="images of 8x9 pixels, not 28x28"):
        datasets.load("mnist", root=tmp_path)


def test_every_published_file_has_a_whole_checksum_and_several_mirrors_that_keep_its_name():
    files = [*published.MNIST, *published.FASHION_MNIST, published.CIFAR10]
    assert len({file.sha256 for file in files}) == len(files)
    for file in files:
        assert len(bytes.fromhex(file.sha256)) == 32
        assert len(set(file.urls)) >= 3
        assert all(url.startswith("http") and url.endswith("/" + file.name) for url in file.urls)
