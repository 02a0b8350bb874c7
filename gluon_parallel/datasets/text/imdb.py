"""IMDB: 25,000 + 25,000 film reviews, liked or not, each in a file of its own, in an archive or a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...errors import DatasetCorrupt
from ..folder import obtain
from ..packed import unpack
from ..published import IMDB
from .dataset import TextDataset, as_texts

CLASSES = ("negative", "positive")
_FOLDERS = {"neg": 0, "pos": 1}
_MOST_BYTES = 2**20  # a hundred times the longest review: a forged archive must not fill the memory


def imdb(folder: Path, download: bool) -> TextDataset:
    """Load IMDB's reviews from `folder`: the published archive, or ``aclImdb`` unpacked from it."""
    place = obtain("imdb", IMDB, folder, download, also=["aclImdb"], embedded="before_after")
    found: dict[str, list[tuple[str, int, str]]] = {"train": [], "test": []}
    for part, kind, name, content in _from_folder(place) if place.is_dir() else _from_archive(place):
        try:
            # Reviews came as web pages, with breaks between paragraphs.
            text = content.decode("utf-8").replace("<br />", " ")
        except UnicodeDecodeError as error:
            raise DatasetCorrupt(f"{place}, {part}/{kind}/{name}: not a text in UTF-8 ({error})") from error
        found[part].append((f"{kind}/{name}", _FOLDERS[kind], text))
    parts = []
    for part, reviews in found.items():
        reviews.sort()  # by folder and name, whatever order the archive has
        missing = [kind for kind, label in _FOLDERS.items() if label not in {review[1] for review in reviews}]
        if missing:
            raise DatasetCorrupt(f"{place}: no reviews in {part}/{missing[0]}; replace it by the published {IMDB.name}")
        parts.append(as_texts([review[2] for review in reviews], [review[1] for review in reviews], str(place)))
    train, test = parts
    return TextDataset("imdb", train, test, num_classes=2, classes=CLASSES)


def _place_of(path: str) -> tuple[str, str, str] | None:
    """(part, kind, name) of ``.../train/pos/0_9.txt``; None for everything else that is published along."""
    steps = path.split("/")[-3:]
    if len(steps) == 3 and steps[0] in ("train", "test") and steps[1] in _FOLDERS and steps[2].endswith(".txt"):
        return steps[0], steps[1], steps[2]
    return None


def _from_folder(folder: Path) -> Iterator[tuple[str, str, str, bytes]]:
    for part in ("train", "test"):
        for kind in _FOLDERS:
            for path in sorted((folder / part / kind).glob("*.txt")):
                yield part, kind, path.name, path.read_bytes()


def _from_archive(path: Path) -> Iterator[tuple[str, str, str, bytes]]:
    for name, content in unpack(path, lambda name: _place_of(name) is not None, _MOST_BYTES, "IMDB"):
        place = _place_of(name)
        assert place is not None
        yield (*place, content)
