"""Staleness of updates: how many updates old the weights of each gradient were, counted per worker."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence


class Staleness:
    """Histograms of staleness, the number of updates between a worker's pull and its own push.

    Example:
        >>> staleness = Staleness(2)
        >>> for updates in (0, 1, 1, 5):
        ...     staleness.record(worker=0, updates=updates)
        >>> staleness.record(worker=1, updates=9, applied=False)
        >>> staleness.mean, staleness.quantiles(), staleness.rejected
        (1.75, (1, 5, 5), [0, 1])
    """

    def __init__(self, num_workers: int) -> None:
        self.histograms: list[Counter[int]] = [Counter() for _ in range(num_workers)]  # of the pushes applied
        self.rejected = [0] * num_workers  # pushes that were not: too old, or too late for their step

    def record(self, worker: int, updates: int, applied: bool = True) -> None:
        """Count one push, whose weights were `updates` updates old when it arrived."""
        if applied:
            self.histograms[worker][updates] += 1
        else:
            self.rejected[worker] += 1

    def since(self, before: Staleness) -> Staleness:
        """What was counted after `before`, which is a copy of this object at an earlier time.

        Example:
            >>> staleness = Staleness(1)
            >>> before = staleness.since(staleness)  # nothing
            >>> staleness.record(worker=0, updates=3)
            >>> staleness.since(before).histograms
            [Counter({3: 1})]
        """
        found = Staleness(len(self.histograms))
        found.histograms = [now - then for now, then in zip(self.histograms, before.histograms)]
        found.rejected = [now - then for now, then in zip(self.rejected, before.rejected)]
        return found

    @property
    def total(self) -> Counter[int]:
        """The histogram of all workers together."""
        return sum(self.histograms, Counter())

    @property
    def mean(self) -> float:
        """Of all updates applied; 0 if there were none."""
        every = list(self.total.elements())
        return sum(every) / max(1, len(every))

    def quantiles(self) -> tuple[int, int, int]:
        """The smallest staleness that half, nine tenths and all of the updates do not exceed; 0 if there were none."""
        every = sorted(self.total.elements()) or [0]
        median, ninetieth, most = (every[math.ceil(share * len(every)) - 1] for share in (0.5, 0.9, 1.0))
        return median, ninetieth, most

    def __repr__(self) -> str:
        median, ninetieth, most = self.quantiles()
        text = f"staleness median {median}, 90 % {ninetieth}, most {most}"
        return text + (f", {sum(self.rejected)} pushes not applied" if any(self.rejected) else "")

    def draw(self, title: str = "", names: Sequence[str] = ()):
        """A Matplotlib figure: one row per worker, the share of its updates at each staleness."""
        from matplotlib.figure import Figure

        most = max([1, *self.total])
        figure = Figure(figsize=(6.5, 0.7 + 0.55 * len(self.histograms)), layout="constrained", facecolor="white")
        figure.suptitle(title, fontsize=11, x=0.01, ha="left", fontweight="bold")
        rows = figure.subplots(len(self.histograms), 1, sharex=True, squeeze=False)[:, 0]
        for worker, (axes, histogram) in enumerate(zip(rows, self.histograms)):
            count = max(1, sum(histogram.values()))
            axes.bar(list(histogram), [times / count for times in histogram.values()], width=0.85, color="#2a6f97")
            label = names[worker] if names else f"worker {worker}"
            rejected = f"\n{self.rejected[worker]} rejected" if self.rejected[worker] else ""
            axes.set_ylabel(f"{label}{rejected}", rotation=0, ha="right", va="center", fontsize=8, color="#52606d")
            axes.set(xlim=(-0.6, most + 0.6), yticks=[])
            axes.tick_params(labelsize=8, colors="#52606d", length=0)
            for side in ("top", "right", "left"):
                axes.spines[side].set_visible(False)
            axes.spines["bottom"].set_color("#cbd2d9")
        rows[-1].set_xlabel("staleness: updates between pull and push", fontsize=9, color="#52606d")
        return figure
