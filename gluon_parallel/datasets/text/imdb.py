"""IMDB: 25,000 + 25,000 film reviews, liked or not, each in a file of its own, in an archive or a folder."""

from pathlib import Path

import numpy as np

from ...errors import DatasetCorrupt
from ..dataset import Dataset, Texts
from ..folder import obtain
from ..packed import read_files
from ..published import IMDB

CLASSES = ("negative", "positive")
_LABELS = {"neg": 0, "pos": 1}
_MOST_BYTES = 2**20  # a hundred times the longest review: a forged archive must not fill the memory


def imdb(folder: Path, download: bool) -> Dataset[Texts]:
    """Load IMDB's reviews from `folder`: the published archive, or ``aclImdb`` unpacked from it."""
    place = obtain("imdb", IMDB, folder, download, also=["aclImdb"], embedded="before_after")
    found: dict[str, list[tuple[str, int, str]]] = {"train": [], "test": []}
    for name, content in read_files(place, r"(train|test)/(neg|pos)/([^/]*\.txt)", _MOST_BYTES, "IMDB"):
        part, kind, file = name.groups()
        try:
            # Reviews came as web pages, with breaks between paragraphs.
            text = content.decode("utf-8").replace("<br />", " ")
        except UnicodeDecodeError as error:
            raise DatasetCorrupt(f"{place}, {part}/{kind}/{file}: not a text in UTF-8 ({error})") from error
        found[part].append((f"{kind}/{file}", _LABELS[kind], text))
    parts = []
    for part, reviews in found.items():
        for kind, label in _LABELS.items():
            if label not in {review[1] for review in reviews}:
                raise DatasetCorrupt(f"{place}: no reviews in {part}/{kind}; replace it by the published {IMDB.name}")
        _, labels, texts = zip(*sorted(reviews))  # by folder and name, whatever order the archive has
        parts.append(Texts(texts, np.array(labels, np.int32)))
    train, test = parts
    return Dataset("imdb", train, test, CLASSES)
