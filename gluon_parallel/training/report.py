"""Metrics of a run: as lines of a table, as rows of metrics.jsonl, as a picture of curves."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any, Optional

COLUMNS = {  # of the table: the title, and how a number is shown, whose width is the column's
    "epoch": ("epoch", "5d"),
    "loss": ("loss", "8.4f"),
    "train_accuracy": ("train acc", "9.2%"),
    "test_accuracy": ("test acc", "8.2%"),
    "map": ("mAP", "7.2%"),
    "pixel_accuracy": ("pixel acc", "9.2%"),
    "miou": ("mIoU", "7.2%"),
    "samples_per_second": ("samples/s", "9,.0f"),
    "staleness": ("staleness", "9.1f"),
    "staleness_median": ("median", "6d"),
    "staleness_90_percent": ("90 %", "4d"),
    "staleness_most": ("most", "4d"),
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


def _columns(row: dict[str, float]) -> dict[str, tuple[str, str]]:
    """The columns of a row; those that are not listed above have their own names. A loss's parts are only drawn."""
    shown = [key for key in row if key in COLUMNS or not key.startswith("loss_")]
    return {key: COLUMNS.get(key, (key.replace("_", " "), f"{max(9, len(key))}.4g")) for key in shown}


def header(row: dict[str, float]) -> str:
    """The table's first line, for rows like `row`."""
    return "  ".join(title.rjust(len(format(0, number))) for title, number in _columns(row).values())


def line(row: dict[str, float]) -> str:
    """One line of the table.

    Example:
        >>> print(header({"epoch": 1, "loss": 0.5, "test_accuracy": 0.975}))
        epoch      loss  test acc
        >>> print(line({"epoch": 1, "loss": 0.5, "test_accuracy": 0.975}))
            1    0.5000    97.50%
    """
    return "  ".join(format(row[key], number) for key, (_, number) in _columns(row).items())


def read_metrics(path: Path, until_epoch: int, until_step: Optional[int] = None) -> list[dict[str, float]]:
    """The rows of a ``metrics.jsonl`` up to an epoch, and up to a line that a crash cut off or damaged.

    Those of single steps are among them, up to the step of that number, or those of these epochs.
    """
    rows = []
    if path.exists():
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(text)
                is_of_step = until_step is not None and "step" in row
                is_within = row["step"] <= until_step if is_of_step else row["epoch"] <= until_epoch
            except (ValueError, TypeError, KeyError, RecursionError):
                break
            if is_within:
                rows.append(row)
    return rows


def write_csv(rows: list[dict[str, float]], file: Any) -> None:
    """Write rows as a table in which those of epochs and of steps have the columns of all.

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> write_csv([{"step": 50, "epoch": 1, "loss": 0.7}, {"epoch": 1, "loss": 0.8, "test_accuracy": 0.5}], file)
        >>> print(file.getvalue().decode())
        step,epoch,loss,test_accuracy
        50,1,0.7,
        ,1,0.8,0.5
        <BLANKLINE>
    """
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    table = csv.DictWriter(text, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    text.detach()


def _unlisted(rows: list[dict[str, float]]) -> dict[str, tuple[str, str, Any]]:
    """How metrics are drawn that are not listed above: losses, and what is from 0 to 1 in all epochs."""
    keys = sorted({key for row in rows for key in row if key not in COLUMNS and key not in CURVES})
    panels = {key: "loss" if "loss" in key else "accuracy" for key in keys}
    drawn = [key for key in keys if panels[key] == "loss" or all(0 <= row.get(key, 0) <= 1 for row in rows)]
    return {key: (panels[key], key.replace("_", " "), f"C{number % 10}") for number, key in enumerate(drawn)}


def curves(rows: list[dict[str, float]], title: str) -> Any:
    """The loss and the accuracies over the epochs, as a Matplotlib figure of its own (no global state is touched)."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", fontweight="bold")
    in_parts = any(key.startswith("loss_") for row in rows for key in row)
    for axes, name in zip(figure.subplots(1, 2), ("loss", "accuracy")):
        drawn: list[float] = []
        for key, (panel, label, colour) in {**_unlisted(rows), **CURVES}.items():
            points = [(row["epoch"], row[key]) for row in rows if math.isfinite(row.get(key, math.nan))]
            if points and panel == name:
                epochs, values = zip(*points)
                label = "sum of the parts" if in_parts and key == "loss" else label
                axes.plot(epochs, values, color=colour, linewidth=1.8, label=label, marker="o", markersize=2.5)
                drawn += values
        alone = axes.lines[0].get_label() if name == "accuracy" and len(axes.lines) == 1 else name
        axes.set_title(
            f"{alone} accuracy" if alone in ("train", "test") else alone, fontsize=10, loc="left", color="#52606d"
        )
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
