"""Data sets of images with labels: files are found and read exactly; what is missing, damaged or forged is named."""

import gzip
import io
import tarfile

import numpy as np
import pytest
import requests
from datasets_files import cifar_batches, cifar_binary, idx, idx_parts, tar_gz, write_files, write_idx_set
from sklearn.datasets import load_digits

from gluon_parallel import datasets
from gluon_parallel.datasets import published
from gluon_parallel.datasets.labelled import enlarge, read_idx, stratified_split
from gluon_parallel.errors import DatasetCorrupt, DatasetUnavailable

ARCHIVE = "cifar-10-binary.tar.gz"
BATCHES = cifar_batches()
FILES = cifar_binary(BATCHES)
WHOLE = tar_gz(FILES)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise requests.ConnectionError(ValueError("this test has no network"))

    monkeypatch.setattr(requests, "get", refuse)


def check(part, images, labels):
    np.testing.assert_allclose(part.images, images.astype(np.float64) / 255, rtol=1e-7, atol=1e-9)  # one rounding
    np.testing.assert_array_equal(part.labels, labels)
    assert part.images.dtype == np.float32 and part.labels.dtype == np.int32


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("compress", [True, False])
def test_images_and_labels_of_idx_files_are_those_in_the_files(tmp_path, name, compress):
    parts = idx_parts()
    write_idx_set(tmp_path / name, parts, compress)
    data = datasets.load(name, root=tmp_path)
    for part, (images, labels) in ((data.train, parts["train"]), (data.test, parts["t10k"])):
        check(part, images[:, None], labels)
    assert (data.name, data.num_classes, len(data.classes)) == (name, 10, 10)


@pytest.mark.parametrize(
    "files",
    [
        FILES,
        {f"cifar-10-batches-bin/{name}": content for name, content in FILES.items()},
        {ARCHIVE: WHOLE},
        {ARCHIVE: tar_gz(dict(reversed(FILES.items())))},
    ],
    ids=["files", "folder", "archive", "archive in another order"],
)
def test_images_and_labels_of_cifar10_are_those_in_the_files(tmp_path, files):
    write_files(tmp_path / "cifar10", files)
    data = datasets.load("cifar10", root=tmp_path, download=False)
    *train, test = BATCHES.values()
    check(data.train, *map(np.concatenate, zip(*train)))
    check(data.test, *test)
    assert data.num_classes == len(data.classes) == 10


NO_CLASS = cifar_batches()
NO_CLASS["data_batch_2"][1][1] = 10
INCOMPLETE = {name: content for name, content in FILES.items() if "4" not in name and "test" not in name}
WRONG_SUM = WHOLE[:-8] + bytes([WHOLE[-8] ^ 1]) + WHOLE[-7:]  # the last eight bytes are the checksum and the length
HUGE = tarfile.TarInfo("data_batch_1.bin")
HUGE.size = 2**40


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({**FILES, "data_batch_3.bin": FILES["data_batch_3.bin"][:-1]}, "data_batch_3.bin: 3072 bytes are no multiple"),
        (cifar_binary(NO_CLASS), "label 10 of image 3 is none of the 10 classes 0..9"),
        ({ARCHIVE: tar_gz(INCOMPLETE)}, "data_batch_4.bin, test_batch.bin not found"),
        *[({ARCHIVE: WHOLE[: int(keep * len(WHOLE))]}, ARCHIVE) for keep in (0.0, 0.5, 0.999)],
        ({ARCHIVE: WRONG_SUM}, "CRC"),
        ({ARCHIVE: gzip.compress(b"<html>" * 1000)}, "no gzipped tar archive"),
        ({ARCHIVE: gzip.compress(HUGE.tobuf() + bytes(1024))}, "claims 1099511627776 bytes"),
    ],
    ids=range(9),
)
def test_files_of_cifar10_that_are_damaged_incomplete_or_others_are_refused(tmp_path, files, message):
    write_files(tmp_path / "cifar10", files)
    with pytest.raises(DatasetCorrupt, match=message):
        datasets.load("cifar10", root=tmp_path)


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
    write_files(tmp_path / "cifar10", {ARCHIVE: buffer.getvalue()})
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DatasetCorrupt, match=r"data_batch_1\.bin, data_batch_3"):
        datasets.load("cifar10", root=tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
WRONG = [
    (idx(IMAGES) + b"x", "cut off or too long: 25 bytes, where it states a shape of (2, 3, 4)"),
    (idx(IMAGES[0, 0]), "starts with 00 00 08 01 where an IDX file of this kind starts with 00 00 08 03"),
    (idx(IMAGES, type_code=0x0D), "starts with 00 00 0d 03"),
    (b"\0\0\x08\x03" + b"\xff" * 12, "0 bytes, where it states a shape of (4294967295, 4294967295, 4294967295)"),
    *[(idx(IMAGES)[:length], "cut off") for length in range(4, len(idx(IMAGES)))],
    *[(idx(IMAGES)[:length], "starts with") for length in range(4)],
]


def test_an_idx_file_that_is_wrong_or_cut_off_anywhere_is_refused_by_what_is_wrong(tmp_path):
    path = tmp_path / "file"
    for content, words in WRONG:
        for packed in (content, gzip.compress(content)):
            path.write_bytes(packed)
            with pytest.raises(DatasetCorrupt) as refusal:
                read_idx(path, num_dims=3)
            assert words in str(refusal.value) and str(path) in str(refusal.value)
    whole = gzip.compress(idx(IMAGES))
    for content in (whole + b"garbage", *(whole[:length] for length in range(2, len(whole)))):
        path.write_bytes(content)
        with pytest.raises(DatasetCorrupt, match="gzip compression is damaged"):
            read_idx(path, num_dims=3)


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
    with pytest.raises(DatasetUnavailable, match="no data set 'imagenet'.*'digits', 'fashion_mnist', 'mnist', 'cifar1"):
        datasets.load("imagenet")
    with pytest.raises(DatasetUnavailable, match="no data set 'yelp' of texts; there are 'before_after'"):
        datasets.text.load("yelp")


@pytest.mark.parametrize("download", [True, False])
@pytest.mark.parametrize(
    ("load", "name", "file", "embedded"),
    [
        (datasets.load, "mnist", "train-images-idx3-ubyte.gz", "digits"),
        (datasets.load, "cifar10", ARCHIVE, "digits"),
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


def test_a_missing_one_of_four_files_is_named_and_so_is_a_folder_that_cannot_be_written(tmp_path):
    write_idx_set(tmp_path / "mnist", idx_parts())
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DatasetUnavailable, match=r"t10k-labels-idx1-ubyte.gz is not in"):
        datasets.load("mnist", root=tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DatasetUnavailable, match="could not be downloaded there .*(exists|directory)"):
        datasets.load("mnist", root=tmp_path / "file")


def test_every_published_file_has_a_whole_checksum_and_several_mirrors_that_keep_its_name():
    files = [*published.MNIST, *published.FASHION_MNIST, published.CIFAR10, *published.AG_NEWS, published.IMDB]
    assert len({file.sha256 for file in files}) == len(files)
    for file in files:
        assert len(bytes.fromhex(file.sha256)) == 32 and len(set(file.urls)) >= 3
        assert all(url.startswith("http") and url.endswith("/" + file.name) for url in file.urls)


def test_every_digit_of_scikit_learn_is_there_once_and_a_fifth_of_every_class_is_kept_for_testing():
    digits, source = datasets.load("digits"), load_digits()
    found = []
    for part in (digits.train, digits.test):
        assert part.images.dtype == np.float32 and part.images.shape == (len(part.labels), 1, 28, 28)
        assert part.images.min() == 0 and part.images.max() == 1 and part.labels.dtype == np.int32
        middles = part.images[:, 0, 3:-2:3, 3:-2:3]  # the middle pixel of each patch lies on the old pixel's centre
        found += [
            (tuple((image.ravel() * 16).round().astype(int)), label) for image, label in zip(middles, part.labels)
        ]
    assert sorted(found) == sorted(zip(map(tuple, source.data.astype(int)), source.target))
    train, test = (np.bincount(part.labels, minlength=10) for part in (digits.train, digits.test))
    np.testing.assert_allclose(test / (train + test), 0.2, atol=0.5 / 174)  # half a sample of the smallest class


def test_the_split_is_the_one_that_published_accuracies_were_measured_on():
    # Written down on purpose: it must not change with the version of NumPy or scikit-learn, nor by an edit.
    _train, test = stratified_split(load_digits().target)
    assert test[:12].tolist() == [3, 7, 13, 19, 36, 38, 43, 48, 53, 55, 60, 62]
    assert (len(test), int(test.sum())) == (359, 311827)


def test_enlarging_is_linear_interpolation_of_rows_and_of_columns():
    image = np.random.RandomState(0).rand(8, 8)
    centres = (np.arange(24) + 0.5) / 3 - 0.5
    rows = np.stack([np.interp(centres, np.arange(8), row) for row in image])
    wanted = np.stack([np.interp(centres, np.arange(8), column) for column in rows.T], axis=1)
    np.testing.assert_allclose(enlarge(image[None])[0], np.pad(wanted, 2), rtol=1e-6, atol=1e-7)  # float32 and float64
