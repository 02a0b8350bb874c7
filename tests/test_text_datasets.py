"""Texts: the published formats are read, what is damaged is named, and order alone tells how the stories end."""

import csv
import gzip
import io
import tarfile
from collections import Counter

import numpy as np
import pytest
import requests

import gluon_parallel as gp
from gluon_parallel.datasets import published
from gluon_parallel.datasets.text.catalog import read_csv
from gluon_parallel.errors import BatchMismatch, DatasetCorrupt, DatasetUnavailable
from gluon_parallel.training.prepare.loaders import shard_loader

text = gp.datasets.text


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise requests.ConnectionError(ValueError("this test has no network"))

    monkeypatch.setattr(requests, "get", refuse)


def test_every_story_has_a_twin_of_the_same_words_that_ends_the_other_way():
    data = text.load("before_after")
    for part in (data.train, data.test):
        bags = {}
        for story, label in zip(part.texts, part.labels):
            bags.setdefault(tuple(sorted(Counter(story.split()).items())), []).append(int(label))
        # So whoever counts words gives both of a pair the same answer, and is right once.
        assert all(labels.count(0) == labels.count(1) for labels in bags.values())
    assert not set(data.train.texts) & set(data.test.texts)
    assert len(data.train.texts) == 2800 and len(data.test.texts) == 500


def test_a_trained_bag_of_words_is_right_half_of_the_time():
    data = text.load("before_after")
    vocabulary = text.Vocabulary(data.train.texts)

    def bags(part):
        return np.stack([np.bincount(row, minlength=len(vocabulary)) for row in map(vocabulary.encode, part.texts)])

    solution = np.linalg.lstsq(bags(data.train), data.train.labels * 2.0 - 1, rcond=None)[0]
    answers = bags(data.test) @ solution
    twins = answers.reshape(-1, 2)
    np.testing.assert_allclose(twins[:, 0], twins[:, 1], atol=1e-9)


def test_stories_end_as_a_reader_would_say():
    data = text.load("before_after")
    for story, label in zip(data.train.texts[:400], data.train.labels):
        first, link, second = next(story.partition(word) for word in (" before ", " after ") if word in story)
        end = second if link == " before " else first
        well = any(
            f" {word}" in end for word in ("warm", "bright", "happy", "clean", "calm", "strong", "rich", "lovely")
        )
        assert well == bool(label)


def test_the_embedded_set_is_the_same_at_every_load():
    first, second = text.load("before_after"), text.load("before_after")
    assert first.train.texts == second.train.texts
    np.testing.assert_array_equal(first.test.labels, second.test.labels)


AG_ROWS = [
    ("3", "Wall St. Bears", 'Short-sellers, "ultra-cynics",\\are back'),
    ("1", "Ähre", "Zwei; drei"),
    ("4", "", "x"),
]


def write_ag_news(folder, rows=AG_ROWS):
    folder.mkdir(parents=True)
    for name in ("train.csv", "test.csv"):
        with open(folder / name, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)


@pytest.mark.parametrize("inside", ["", "ag_news_csv"])
def test_ag_news_is_read_as_it_is_published(tmp_path, inside):
    write_ag_news(tmp_path / "ag_news" / inside)
    data = text.load("ag_news", root=tmp_path)
    assert data.train.texts == ('Wall St. Bears Short-sellers, "ultra-cynics", are back', "Ähre Zwei; drei", " x")
    assert data.train.labels.tolist() == [2, 0, 3]
    assert data.classes[2] == "Business"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'"1","a","b"\n"5","a","b"\n', "line 2: got 3 columns beginning with"),
        (b'"1","a"\n', "line 1: got 2 columns"),
        (b"", "no texts at all"),
        (b"\xff\xfe\x00", "no CSV file in UTF-8"),
    ],
)
def test_a_damaged_csv_file_is_refused_with_its_line(tmp_path, content, message):
    (tmp_path / "train.csv").write_bytes(content)
    with pytest.raises(DatasetCorrupt, match=message):
        read_csv(tmp_path / "train.csv")


REVIEWS = {
    "train/neg/1_2.txt": "Bad.<br /><br />Truly", "train/neg/0_1.txt": "Dull", "train/pos/0_9.txt": "Grand é",
    "test/neg/0_3.txt": "No", "test/pos/0_10.txt": "Yes", "train/unsup/0_0.txt": "?", "README": "about",
    "train/urls_pos.txt": "http",
}  # fmt: skip


def write_imdb(folder, packed, reviews=REVIEWS):
    folder.mkdir(parents=True)
    if not packed:
        for name, content in reviews.items():
            path = folder / "aclImdb" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        return
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in reviews.items():
            member = tarfile.TarInfo(f"aclImdb/{name}")
            member.size = len(content.encode())
            archive.addfile(member, io.BytesIO(content.encode()))
    (folder / "aclImdb_v1.tar.gz").write_bytes(gzip.compress(buffer.getvalue()))


@pytest.mark.parametrize("packed", [True, False])
def test_imdb_is_read_from_its_archive_and_from_its_folder(tmp_path, packed):
    write_imdb(tmp_path / "imdb", packed)
    data = text.load("imdb", root=tmp_path)
    assert data.train.texts == ("Dull", "Bad.  Truly", "Grand é")
    assert data.train.labels.tolist() == [0, 0, 1]
    assert data.test == (("No", "Yes"), pytest.approx([0, 1]))


def test_a_cut_off_archive_and_one_without_a_class_are_refused(tmp_path):
    write_imdb(tmp_path / "imdb", True)
    path = tmp_path / "imdb" / "aclImdb_v1.tar.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DatasetCorrupt, match="damaged or cut off"):
        text.load("imdb", root=tmp_path)
    write_imdb(tmp_path / "b" / "imdb", True, {k: v for k, v in REVIEWS.items() if "test/pos" not in k})
    with pytest.raises(DatasetCorrupt, match="no reviews in test/pos"):
        text.load("imdb", root=tmp_path / "b")


@pytest.mark.parametrize(("name", "file"), [("ag_news", "train.csv"), ("imdb", "aclImdb_v1.tar.gz")])
def test_offline_one_sentence_names_the_file_the_folder_and_the_embedded_set(tmp_path, name, file):
    with pytest.raises(DatasetUnavailable) as refusal:
        text.load(name, root=tmp_path)
    sentence = str(refusal.value)
    assert sentence.startswith(f"{name}: {file} is not in {tmp_path / name}, and ")
    assert '"before_after"' in sentence
    assert "no connection" in sentence
    with pytest.raises(DatasetUnavailable, match="no data set 'yelp' of texts; there are 'before_after'"):
        text.load("yelp")


def test_published_texts_have_whole_checksums_and_mirrors_that_keep_their_names():
    for file in (*published.AG_NEWS, published.IMDB):
        assert len(bytes.fromhex(file.sha256)) == 32
        assert len(set(file.urls)) >= 2
        assert all(url.startswith("http") and url.endswith("/" + file.name) for url in file.urls)


def test_the_vocabulary_holds_the_most_frequent_words_and_orders_ties_by_the_alphabet():
    vocabulary = text.Vocabulary(["b a a", "c b a d"], max_size=5)
    assert vocabulary.words == ("<pad>", "<unk>", "a", "b", "c")
    assert vocabulary.encode("a d b A zz").tolist() == [2, 1, 3, 2, 1]
    assert vocabulary.encode("a b c", max_length=2).tolist() == [2, 3]
    assert vocabulary.encode("").tolist() == [text.UNKNOWN]


@pytest.fixture
def encoded(rng):
    lengths = rng.integers(1, 40, size=203)
    return [np.full(length, index + 2) for index, length in enumerate(lengths)], np.arange(203) % 3


def test_every_text_comes_once_per_epoch_with_its_label_and_its_length(encoded):
    texts, labels = encoded
    loader = text.batches(texts, labels, 16, shuffle=True, seed=3)
    orders = []
    for _ in range(2):
        seen = []
        for (tokens, lengths), batch_labels in loader:
            assert tokens.shape[1] % 4 == 0
            for row, length, label in zip(tokens, lengths, batch_labels):
                index = row[0] - 2
                np.testing.assert_array_equal(row[: int(length)], texts[index])
                assert not row[int(length) :].any()
                assert label == labels[index]
                seen.append(index)
        assert sorted(seen) == list(range(203))
        orders.append(seen)
    assert orders[0] != orders[1]
    assert len(loader) == 13


def test_bucketing_pads_less_than_chance(encoded):
    texts, labels = encoded

    def cost(loader):
        return sum(tokens.size for (tokens, _), _ in loader)

    bucketed = cost(text.batches(texts, labels, 16, shuffle=True, pool=20, multiple=1))
    by_chance = cost(text.batches(texts, labels, 16, shuffle=True, pool=1, multiple=1))
    assert bucketed < 0.75 * by_chance


def test_an_epoch_can_be_entered_in_its_middle(encoded):
    loader = text.batches(*encoded, 16, shuffle=True, seed=1)
    loader.set_epoch(5)
    whole = [labels.tolist() for _, labels in loader]
    loader.set_epoch(5, start=9)
    assert [labels.tolist() for _, labels in loader] == whole[9:]
    with pytest.raises(BatchMismatch, match="start=14; expected a whole number from 0 to 13"):
        loader.set_epoch(0, start=14)


def test_the_batches_of_all_workers_together_are_those_of_one(encoded):
    alone = text.batches(*encoded, 12, shuffle=True, seed=1)
    parts = [text.batches(*encoded, 4, shuffle=True, seed=1, rank=rank, num_workers=3) for rank in range(3)]
    assert {len(part) for part in parts} == {len(alone)}
    for ((tokens, lengths), labels), *shares in zip(alone, *parts):
        np.testing.assert_array_equal(np.concatenate([share[0][0] for share in shares]), tokens)
        np.testing.assert_array_equal(np.concatenate([share[0][1] for share in shares]), lengths)
        np.testing.assert_array_equal(np.concatenate([share[1] for share in shares]), labels)


def test_prepared_batches_of_several_processes_hold_every_text_once(encoded):
    parts = [shard_loader(text.batches(*encoded, 16, shuffle=True), rank, 2, seed=0) for rank in range(2)]
    for _ in range(3):  # the smaller batch comes at another place in every epoch
        first = [row[0] for part in parts for (tokens, _), _ in part for row in tokens]
        assert sorted(first) == list(range(2, 205))


def test_texts_and_labels_of_different_number_are_refused():
    with pytest.raises(BatchMismatch, match="1 samples but 2 labels"):
        text.batches([np.array([1])], [0, 1], 2)
