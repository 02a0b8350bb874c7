"""load(name, root): which folder is read, which file is missing, what does not belong together."""

import numpy as np
import pytest
import requests
from datasets_files import idx_parts, write_idx_set

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


@pytest.mark.parametrize(
    ("folder", "root", "variable"),
    [
        ("fashion-mnist", "fashion-mnist", None),  # the data set's own
        ("all/fashion_mnist", "all", "elsewhere"),  # that of all data sets
        ("variable/fashion_mnist", None, "~/variable"),
        (".gluon_parallel/datasets/fashion_mnist", None, None),
    ],
)
def test_the_folder_is_the_one_named_or_that_of_the_variable_or_in_the_home(
    tmp_path, monkeypatch, folder, root, variable
):
    write_idx_set(tmp_path / folder, idx_parts(seed=2))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GLUON_PARALLEL_DATA", raising=False)
    if variable:
        monkeypatch.setenv("GLUON_PARALLEL_DATA", variable)
    data = datasets.load("fashion_mnist", root and tmp_path / root, download=False)
    np.testing.assert_array_equal(data.train.labels, idx_parts(seed=2)["train"][1])


def test_an_unknown_data_set_gives_the_list_of_those_there_are():
    with pytest.raises(DatasetUnavailable, match="no data set 'imagenet'") as refusal:
        datasets.load("imagenet")
    assert all(repr(name) in str(refusal.value) for name in datasets.NAMES)
    assert set(datasets.NAMES) == {"digits", "fashion_mnist", "mnist", "cifar10"}
    with pytest.raises(DatasetUnavailable, match="no data set 'yelp' of texts; there are 'before_after'"):
        datasets.text.load("yelp")


@pytest.mark.parametrize("download", [True, False])
@pytest.mark.parametrize(
    ("load", "name", "file", "embedded"),
    [
        (datasets.load, "mnist", "train-images-idx3-ubyte.gz", "digits"),
        (datasets.load, "fashion_mnist", "train-images-idx3-ubyte.gz", "digits"),
        (datasets.load, "cifar10", "cifar-10-binary.tar.gz", "digits"),
        (datasets.text.load, "ag_news", "train.csv", "before_after"),
        (datasets.text.load, "imdb", "aclImdb_v1.tar.gz", "before_after"),
    ],
)
def test_offline_one_sentence_names_the_file_the_folder_and_the_embedded_data_set(
    tmp_path, load, name, file, embedded, download
):
    with pytest.raises(DatasetUnavailable) as refusal:
        load(name, root=tmp_path, download=download)
    sentence = str(refusal.value)
    assert sentence.startswith(f"{name}: {file} is not in {tmp_path / name}, and ")
    assert all(word in sentence for word in ("root=", "GLUON_PARALLEL_DATA", f'"{embedded}"'))
    assert sentence.count("no connection") == (3 if download else 0)
    assert "\n" not in sentence and ". " not in sentence, "one sentence"


def test_a_missing_one_of_four_files_is_named(tmp_path):
    write_idx_set(tmp_path / "mnist", idx_parts())
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DatasetUnavailable, match=r"t10k-labels-idx1-ubyte.gz is not in"):
        datasets.load("mnist", root=tmp_path)


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DatasetUnavailable, match="could not be downloaded there .*(exists|directory)"):
        datasets.load("mnist", root=tmp_path / "file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts.update(train=(parts["train"][0], parts["train"][1][:-1])), "5 images but 4 labels"),
        (lambda parts: parts["t10k"][1].__setitem__(2, 200), r"t10k-labels.*label 200 of image 2 is none of the 10 cl"),
        (lambda parts: parts.update(t10k=idx_parts(test=0)["t10k"]), "no images at all"),
        (lambda parts: parts.update(train=(np.zeros((5, 8, 9)), parts["train"][1])), "images of 8x9 pixels, not 28x28"),
    ],
)
def test_what_does_not_belong_together_is_refused(tmp_path, change, message):
    parts = idx_parts()
    change(parts)
    write_idx_set(tmp_path / "mnist", parts)
    with pytest.raises(DatasetCorrupt, match=message):
        datasets.load("mnist", root=tmp_path)


TEXTS = (*published.AG_NEWS, published.IMDB)


def test_every_published_file_has_a_whole_checksum_and_several_mirrors_that_keep_its_name():
    files = [*published.MNIST, *published.FASHION_MNIST, published.CIFAR10, *TEXTS]
    assert len({file.sha256 for file in files}) == len(files)
    for file in files:
        assert len(bytes.fromhex(file.sha256)) == 32
        assert len(set(file.urls)) >= 3
        assert all(url.startswith("http") and url.endswith("/" + file.name) for url in file.urls)
