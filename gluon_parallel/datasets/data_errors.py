"""Data errors: what is wrong with a data set's files, counted while its index is built, with examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import DatasetCorrupt

BROKEN = ("raise", "skip")  # what becomes of a sample whose files cannot be read
_EXAMPLES = 3  # of each kind are named


class DataError(NamedTuple):
    """One error in a file of a data set."""

    kind: str  # in a few words, the same for all of the kind
    where: str  # the file
    detail: str = ""
    broken: bool = False  # the whole sample cannot be used


class Report:
    """How many samples a data set has, and what was left out or altered; ``print(report)`` says it in words.

    Attributes:
        name: of the data set.
        num_samples: that can be used.
        num_boxes: on them, or None where there are none to count.
        counts: how often each kind of error occurred.

    Example:
        >>> print(Report("voc train", 8, 21, [DataError("box without area", "a.xml", "box 2")]))
        voc train: 8 images, 21 boxes
          box without area: 1 (a.xml: box 2)
    """

    def __init__(self, name: str, num_samples: int, num_boxes: int | None, data_errors: Iterable[DataError]):
        self.name, self.num_samples, self.num_boxes = name, num_samples, num_boxes
        self._data_errors = list(data_errors)
        self.counts = dict(Counter(error.kind for error in self._data_errors))

    def __str__(self) -> str:
        boxes = "" if self.num_boxes is None else f", {self.num_boxes} boxes"
        return f"{self.name}: {self.num_samples} images{boxes}" + "".join(f"\n  {line}" for line in self._lines())

    def _lines(self):
        for kind, count in self.counts.items():
            alike = [error for error in self._data_errors if error.kind == kind]
            effect = ", image left out" if alike[0].broken else ""
            named = "; ".join(_in_words(error) for error in alike[:_EXAMPLES])
            more = f"; and {count - _EXAMPLES} more" if count > _EXAMPLES else ""
            yield f"{kind}{effect}: {count} ({named}{more})"


def refuse_broken(name: str, data_errors: Iterable[DataError], broken: str) -> None:
    """Stop if samples cannot be used and `broken` is "raise"; all kinds are named at once.

    Raises:
        DatasetCorrupt: says how many of each kind, with examples, and how to go on without them.
        ValueError: `broken` is no such word.
    """
    if broken not in BROKEN:
        raise ValueError(f"{name}: broken={broken!r} is none of {', '.join(map(repr, BROKEN))}")
    unusable = [error for error in data_errors if error.broken]
    if unusable and broken == "raise":
        report = Report(name, 0, None, unusable)
        lines = "".join(f"\n  {line}".replace(", image left out", "") for line in report._lines())
        raise DatasetCorrupt(
            f"{name}: {len(unusable)} images cannot be used; mend or remove them, or leave them out with "
            f"broken='skip':{lines}"
        )


def _in_words(error):
    return f"{error.where}: {error.detail}" if error.detail else error.where
