"""Texts: the published formats are read, what is damaged is named, and order alone tells how the stories end."""

import csv
from collections import Counter

import pytest
from datasets_files import tar_gz, write_files

import gluon_parallel as gp
from gluon_parallel.datasets.text.catalog import read_csv
from gluon_parallel.errors import DatasetCorrupt

text = gp.datasets.text


def test_every_story_has_a_twin_of_the_same_words_that_ends_the_other_way_so_counting_words_tells_nothing():
    data, again = text.load("before_after"), text.load("before_after")
    assert data.train.texts == again.train.texts and data.test.labels.tolist() == again.test.labels.tolist()
    for part in (data.train, data.test):
        bags = {}
        for story, label in zip(part.texts, part.labels):
            bags.setdefault(tuple(sorted(Counter(story.split()).items())), []).append(int(label))
        assert all(labels.count(0) == labels.count(1) for labels in bags.values())
    assert not set(data.train.texts) & set(data.test.texts)
    assert len(data.train.texts) == 2800 and len(data.test.texts) == 500


def test_stories_end_as_a_reader_would_say():
    data = text.load("before_after")
    for story, label in zip(data.train.texts[:400], data.train.labels):
        first, link, second = next(story.partition(word) for word in (" before ", " after ") if word in story)
        end = second if link == " before " else first
        words = "warm", "bright", "happy", "clean", "calm", "strong", "rich", "lovely"
        assert any(f" {word}" in end for word in words) == bool(label)


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
    files = {name: content.encode() for name, content in reviews.items()}
    if packed:
        (folder / "aclImdb_v1.tar.gz").write_bytes(tar_gz(files, "aclImdb"))
    else:
        write_files(folder / "aclImdb", files)


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


def test_the_vocabulary_holds_the_most_frequent_words_and_orders_ties_by_the_alphabet():
    vocabulary = text.Vocabulary(["b a a", "c b a d"], max_size=5)
    assert vocabulary.words == ("<pad>", "<unk>", "a", "b", "c")
    assert vocabulary.encode("a d b A zz").tolist() == [2, 1, 3, 2, 1]
    assert vocabulary.encode("a b c", max_length=2).tolist() == [2, 3]
    assert vocabulary.encode("").tolist() == [text.UNKNOWN]
