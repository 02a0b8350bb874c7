"""Report of a run: a table on the terminal, metrics.jsonl, TensorBoard's files, a picture of the curves."""

import json
import math
from pathlib import Path
from typing import Any

from .. import archive
from ..errors import ConfigError
from . import pictures

COLUMNS = {  # of the table: the title, and how a number is shown, whose width is the column's
    "epoch": ("epoch", "5d"),
    "loss": ("loss", "8.4f"),
    "train_accuracy": ("train acc", "9.2%"),
    "test_accuracy": ("test acc", "8.2%"),
    "map": ("mAP", "7.2%"),
    "pixel_accuracy": ("pixel acc", "9.2%"),
    "miou": ("mIoU", "7.2%"),
    "images_per_second": ("images/s", "8,.0f"),
    "texts_per_second": ("texts/s", "8,.0f"),
    "staleness": ("staleness", "9.1f"),
    "staleness_median": ("median", "6d"),
    "staleness_90_percent": ("90 %", "4d"),
    "staleness_most": ("most", "4d"),
    "seconds": ("seconds", "7.1f"),
}
CURVES = {  # the picture, of two side by side, with the name and the colour of each
    "loss": ("loss", "train", "#9aa5b1"),
    "loss_rpn_class": ("loss", "proposals' scores", "#2a6f97"),
    "loss_rpn_box": ("loss", "proposals' boxes", "#61a5c2"),
    "loss_head_class": ("loss", "classes", "#b5651d"),
    "loss_head_box": ("loss", "boxes", "#e0a458"),
    "train_accuracy": ("accuracy", "train", "#9aa5b1"),
    "test_accuracy": ("accuracy", "test", "#c8102e"),
    "map": ("accuracy", "mAP", "#c8102e"),
    "pixel_accuracy": ("accuracy", "pixels", "#9aa5b1"),
    "miou": ("accuracy", "mIoU", "#c8102e"),
}


def header(row: dict[str, float]) -> str:
    """The table's first line, for rows like `row`."""
    shown = [COLUMNS[key] for key in row if key in COLUMNS]
    return "  ".join(title.rjust(len(format(0, number))) for title, number in shown)


def line(row: dict[str, float]) -> str:
    """One line of the table.

    Example:
        >>> print(header({"epoch": 1, "loss": 0.5, "test_accuracy": 0.975}))
        epoch      loss  test acc
        >>> print(line({"epoch": 1, "loss": 0.5, "test_accuracy": 0.975}))
            1    0.5000    97.50%
    """
    return "  ".join(format(value, COLUMNS[key][1]) for key, value in row.items() if key in COLUMNS)


def read_metrics(path: Path, until_epoch: int) -> list[dict[str, float]]:
    """The rows of a ``metrics.jsonl`` up to an epoch; a last line that a crash cut off does not count."""
    rows = []
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(text)
            except json.JSONDecodeError:
                break
            if row["epoch"] <= until_epoch:
                rows.append(row)
    return rows


class Report:
    """One row of numbers per epoch, told everywhere at once: on the terminal and in files in `folder`.

    Rows after `until_epoch` of a resumed run are dropped, for they were never saved in a checkpoint.
    """

    def __init__(self, folder: Path, tensorboard: bool = False, until_epoch: int = 0) -> None:
        self.path = folder / "metrics.jsonl"
        self.curves_path = folder / "curves.png"
        self.rows = read_metrics(self.path, until_epoch)
        self._shown = 0  # rows that the terminal has seen
        self._titled: set[str] = set()  # columns that it has seen a title of
        self._writer: Any = None
        if tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ImportError as error:
                raise ConfigError(
                    "tensorboard: true needs tensorboardX, which is not here: pip install 'tensorboardX>=2.6,<2.7'. "
                    "Or leave it out: metrics.jsonl has the same numbers"
                ) from error
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=until_epoch + 1)
        self._write_metrics()

    def _write_metrics(self) -> None:
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        archive.replace(self.path, lambda file: file.write(text.encode()))

    def show(self) -> None:
        """Print the table's new rows, the first time with those of the run that is continued.

        A header stands above the first one, and above the first that has more columns: not every epoch is evaluated.
        """
        for row in self.rows[self._shown :]:
            if not COLUMNS.keys() & row.keys() <= self._titled:
                print(header(row))
                self._titled = set(row)
            print(line(row), flush=True)
        self._shown = len(self.rows)

    def add(self, **row: float) -> None:
        """Tell one epoch's numbers: ``add(epoch=1, loss=0.3, test_accuracy=0.97)``."""
        self.rows.append(row)
        self._write_metrics()
        if self._writer is not None:
            for key, value in row.items():
                if key != "epoch":
                    self._writer.add_scalar(key, value, int(row["epoch"]))
            self._writer.flush()
        self.show()

    def draw(self, title: str) -> Path:
        """Draw the curves of all epochs so far; returns the picture's path."""
        self.show()
        pictures.write(lambda: curves(self.rows, title), self.curves_path, dpi=144)
        return self.curves_path

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def curves(rows: list[dict[str, float]], title: str) -> Any:
    """The loss and the accuracies over the epochs, as a Matplotlib figure of its own (no global state is touched)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", fontweight="bold")
    in_parts = any(key.startswith("loss_") for row in rows for key in row)
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy")):
        drawn: list[float] = []
        for key, (panel, label, colour) in CURVES.items():
            points = [(row["epoch"], row[key]) for row in rows if math.isfinite(row.get(key, math.nan))]
            if points and panel == name:
                epochs, values = zip(*points)
                label = "sum of the parts" if in_parts and key == "loss" else label
                axes.plot(epochs, values, color=colour, linewidth=1.8, label=label, marker="o", markersize=2.5)
                drawn += values
        alone = name == "accuracy" and len(axes.lines) == 1
        axes.set_title(axes.lines[0].get_label() if alone else name, fontsize=10, loc="left", color="#52606d")
        axes.set_xlabel("epoch", fontsize=9, color="#52606d")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.tick_params(which="both", labelsize=8, colors="#52606d", length=0)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in axes.spines.values():
            side.set_visible(False)
        if name == "accuracy":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
        elif drawn and min(drawn) > 0 and max(drawn) > 10 * min(drawn):
            axes.set_yscale("log")  # the last epochs would otherwise lie flat on the axis
        if len(axes.lines) > 1:  # below the axis, where it covers no curve
            axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.17), ncols=3,
                        columnspacing=1.2)  # fmt: skip
    return figure
