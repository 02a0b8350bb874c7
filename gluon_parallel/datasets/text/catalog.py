"""Data sets of texts by name; a new one is entered here."""

from __future__ import annotations

import os

from ..dataset import Dataset, Texts, find
from ..folder import data_folder
from .ag_news import ag_news
from .before_after import before_after
from .imdb import imdb

_LOAD = {"before_after": lambda folder, download: before_after(), "ag_news": ag_news, "imdb": imdb}
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
