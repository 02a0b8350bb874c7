"""Data errors: what is wrong with a data set's files, counted while its index is built, with examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

_EXAMPLES = 3  # of each kind are named


class DataError(NamedTuple):
    """One error in a file of a data set."""

    kind: str  # in a few words, the same for all of the kind
    where: str  # the file
    detail: str = ""
    broken: bool = False  # the whole sample cannot be used


class BrokenSample(Exception):
    """A sample cannot be used; `error` says why."""

    def __init__(self, kind: str, where: object, detail: str = ""):
        super().__init__(kind)
        self.error = DataError(kind, str(where), detail, broken=True)


class Report(NamedTuple):
    """How many samples a data set has, and what was left out or altered; ``print(report)`` says it in words.

    Example:
        >>> print(Report("voc train", 8, 21, [DataError("box without area", "a.xml", "box 2")]))
        voc train: 8 images, 21 boxes
          box without area: 1 (a.xml: box 2)
    """

    name: str  # of the data set
    num_samples: int  # that can be used
    num_boxes: int | None  # on them, or None where there are none to count
    data_errors: list[DataError]

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind of error occurred."""
        return dict(Counter(error.kind for error in self.data_errors))

    def __str__(self) -> str:
        boxes = "" if self.num_boxes is None else f", {self.num_boxes} boxes"
        return f"{self.name}: {self.num_samples} images{boxes}{in_lines(self.data_errors, ', image left out')}"


def in_lines(data_errors: Iterable[DataError], effect: str = "") -> str:
    """A line for each kind of error; `effect` is that of one that breaks its sample."""
    kinds: dict[str, list[DataError]] = {}
    for error in data_errors:
        kinds.setdefault(error.kind, []).append(error)
    lines = ""
    for kind, alike in kinds.items():
        named = "; ".join(": ".join(filter(None, (error.where, error.detail))) for error in alike[:_EXAMPLES])
        more = f"; and {len(alike) - _EXAMPLES} more" if len(alike) > _EXAMPLES else ""
        lines += f"\n  {kind}{effect if alike[0].broken else ''}: {len(alike)} ({named}{more})"
    return lines
