"""AG News: 120,000 + 7,600 news of four kinds, in two CSV files."""

import csv
from pathlib import Path

import numpy as np

from ...errors import DatasetCorrupt
from ..dataset import Dataset, Texts
from ..folder import obtain
from ..published import AG_NEWS

CLASSES = ("World", "Sports", "Business", "Sci/Tech")


def ag_news(folder: Path, download: bool) -> Dataset[Texts]:
    """Load AG News from `folder`, where the files may also lie in the archive's own folder, ``ag_news_csv``."""
    paths = [
        obtain("ag_news", file, folder, download, also=[f"ag_news_csv/{file.name}"], embedded="before_after")
        for file in AG_NEWS
    ]
    train, test = (read_csv(path) for path in paths)
    return Dataset("ag_news", train, test, CLASSES)


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
