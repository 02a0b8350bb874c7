"""Data sets of texts by name; a new one is entered here."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np

from ...errors import DatasetCorrupt
from ..dataset import Dataset, Texts, data_folder, find, obtain, read_files
from ..published import AG_NEWS, IMDB

SEED = 0  # of the one set that there is
_PAIRS = {"train": 1400, "test": 250}
_WELL = ("warm", "bright", "happy", "clean", "calm", "strong", "rich", "lovely")
_BADLY = ("cold", "dark", "sad", "dirty", "angry", "weak", "poor", "awful")
_WHO = ("soup", "house", "child", "river", "king", "market", "teacher", "ship", "garden", "old man", "small town")
_VERBS = ("was", "became", "looked", "turned")
_OPENINGS = ("", "", "they say that", "as everybody knows", "in the year of the great storm", "one day")
_ENDINGS = ("", "", "so they tell", "and nobody knows why", "as it is written in the old book")


def before_after() -> Dataset[Texts]:
    """3,300 stories that end well or badly, in pairs of the same words in another order; the order is fixed.

    "the soup was cold before the bread was warm" ends well; "the bread was warm before the soup was cold" ends badly;
    and "the soup was cold after the bread was warm" ends badly, too. Every story's twin, its two halves exchanged, is
    in the same part with the other label. A model that sees only which words occur is right half of the time.
    """
    random = np.random.RandomState(SEED)  # NumPy has frozen its stream
    parts: list[Texts] = []
    seen: set[str] = set()
    for num_pairs in _PAIRS.values():
        texts: list[str] = []
        labels: list[int] = []
        while len(texts) < 2 * num_pairs:
            good, bad, link, opening, ending = _draw(random)
            pair = [_story(opening, good, link, bad, ending), _story(opening, bad, link, good, ending)]
            if pair[0] in seen:
                continue  # a story to be tested on is none that was trained on
            seen.update(pair)
            texts += pair
            labels += [0, 1] if link == "before" else [1, 0]  # what comes last: the second half, or the first
        parts.append(Texts(tuple(texts), np.array(labels, np.int32)))
    train, test = parts
    return Dataset("before_after", train, test, classes=("ends badly", "ends well"))


def _draw(random):
    halves = []
    for adjectives in (_WELL, _BADLY):
        who, verb, adjective = (words[random.randint(len(words))] for words in (_WHO, _VERBS, adjectives))
        halves.append(f"the {who} {verb} {adjective}")
    link = ("before", "after")[random.randint(2)]
    return (*halves, link, _OPENINGS[random.randint(len(_OPENINGS))], _ENDINGS[random.randint(len(_ENDINGS))])


def _story(opening, first, link, second, ending):
    return " ".join(part for part in (opening, first, link, second, ending) if part)


_LABELS = {"neg": 0, "pos": 1}
_MOST_BYTES = 2**20  # a hundred times the longest review: a forged archive must not fill the memory


def _ag_news(folder: Path, download: bool) -> Dataset[Texts]:
    """AG News: 120,000 + 7,600 news of four kinds, two files in `folder` or in the archive's folder ``ag_news_csv``."""
    paths = [
        obtain("ag_news", file, folder, download, also=[f"ag_news_csv/{file.name}"], embedded="before_after")
        for file in AG_NEWS
    ]
    train, test = (read_csv(path) for path in paths)
    return Dataset("ag_news", train, test, ("World", "Sports", "Business", "Sci/Tech"))


def read_csv(path: Path) -> Texts:
    """Read one file: a class from 1 to 4, a title and a description per line; a backslash stands for a new line.

    DatasetCorrupt names the line that is not like this.
    """
    texts, labels = [], []
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            for row in rows:
                if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                    raise DatasetCorrupt(
                        f"{path}, line {rows.line_num}: got {len(row)} columns beginning with {row[:1]}, wanted a "
                        'class from "1" to "4", a title and a description; replace it by the published file'
                    )
                labels.append(int(row[0]) - 1)
                texts.append(f"{row[1]} {row[2]}".replace("\\", " "))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DatasetCorrupt(f"{path}: no CSV file in UTF-8 ({error}); replace it by the published file") from error
    if not texts:
        raise DatasetCorrupt(f"{path}: no texts at all; replace it by the published one")
    return Texts(tuple(texts), np.array(labels, np.int32))


def _imdb(folder: Path, download: bool) -> Dataset[Texts]:
    """IMDB: 25,000 + 25,000 film reviews, each a file in the archive in `folder` or in the unpacked ``aclImdb``."""
    path = obtain("imdb", IMDB, folder, download, also=["aclImdb"], embedded="before_after")
    found: dict[str, list[tuple[str, int, str]]] = {"train": [], "test": []}
    for name, content in read_files(path, r"(train|test)/(neg|pos)/([^/]*\.txt)", _MOST_BYTES, "IMDB"):
        part, kind, file = name.groups()
        try:
            # Reviews came as web pages, with breaks between paragraphs.
            text = content.decode("utf-8").replace("<br />", " ")
        except UnicodeDecodeError as error:
            raise DatasetCorrupt(f"{path}, {part}/{kind}/{file}: not a text in UTF-8 ({error})") from error
        found[part].append((f"{kind}/{file}", _LABELS[kind], text))
    parts = []
    for part, reviews in found.items():
        for kind, label in _LABELS.items():
            if label not in {review[1] for review in reviews}:
                raise DatasetCorrupt(f"{path}: no reviews in {part}/{kind}; replace it by the published {IMDB.name}")
        _, labels, texts = zip(*sorted(reviews))  # by folder and name, whatever order the archive has
        parts.append(Texts(texts, np.array(labels, np.int32)))
    train, test = parts
    return Dataset("imdb", train, test, ("negative", "positive"))


_LOAD = {"before_after": lambda folder, download: before_after(), "ag_news": _ag_news, "imdb": _imdb}
NAMES = tuple(_LOAD)


def load(name: str, root: str | os.PathLike[str] | None = None, download: bool = True) -> Dataset[Texts]:
    """Load a set of texts into memory.

    Args:
        name: "before_after" (embedded: short stories of which only the order of words tells the end), "ag_news"
            (127,600 news of four kinds), "imdb" (50,000 film reviews, liked or not).
        root, download: as for :func:`gluon_parallel.datasets.load`, and so are the errors.

    Example:
        >>> data = load("before_after")
        >>> data.classes, len(data.train.texts) == len(data.train.labels)
        (('ends badly', 'ends well'), True)
    """
    return find(name, _LOAD, " of texts")(data_folder(name, root), download)
