"""Text data sets by name."""

from __future__ import annotations

import os

from ...errors import DatasetUnavailable
from ..folder import data_folder
from .ag_news import ag_news
from .before_after import before_after
from .dataset import TextDataset
from .imdb import imdb

_IN_FILES = {"ag_news": ag_news, "imdb": imdb}
NAMES = ("before_after", *_IN_FILES)


def load(name: str, root: str | os.PathLike[str] | None = None, download: bool = True) -> TextDataset:
    """Load a set of texts into memory.

    Args:
        name: "before_after" (embedded: short stories of which only the order of words tells the end), "ag_news"
            (127,600 news of four kinds), "imdb" (50,000 film reviews, liked or not).
        root: as for :func:`gluon_parallel.datasets.load`.
        download: fetch a file that is not there.

    Raises:
        DatasetUnavailable: there is no such set, or a file is neither in the folder nor to be downloaded.
        DatasetCorrupt: a file is damaged or another one.

    Example:
        >>> data = load("before_after")
        >>> data.classes, len(data.train.texts) == len(data.train.labels)
        (('ends badly', 'ends well'), True)
    """
    if name == "before_after":
        return before_after()
    if name not in _IN_FILES:
        raise DatasetUnavailable(f"there is no set of texts {name!r}; there are {', '.join(map(repr, NAMES))}")
    return _IN_FILES[name](data_folder(name, root), download)
