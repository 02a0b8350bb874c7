"""What a net sees: images beside their true and predicted boxes or masks, as one PNG."""

from __future__ import annotations

import colorsys
import os
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from .. import archive

TITLES = ("image", "truth", "prediction")
VOID = -1  # in a mask: what does not count
_COLOURS = "#e6194b #3cb44b #4363d8 #f58231 #911eb4 #008fa6 #d137c4 #7a8b00 #b5651d #e0a800".split()
_TEXT, _MUTED = "#1f2933", "#52606d"
_SIDE = 1.9  # inches of an image's longer side


class Panel(NamedTuple):
    """One image and what is drawn upon it."""

    image: np.ndarray  # (H, W, 3) uint8
    boxes: np.ndarray = np.zeros((0, 4))  # (N, 4): xmin, ymin, xmax, ymax in pixels, from 0 and inclusive
    classes: np.ndarray = np.zeros(0, int)  # (N,)
    scores: Optional[np.ndarray] = None  # (N,) from 0 to 1
    mask: Optional[np.ndarray] = None  # (H, W) integers: a class, 0 for background, VOID
    note: str = ""  # stands in the middle, where there is nothing else to see


def boxes(image, truth, prediction, threshold: float = 0.5) -> list[Panel]:
    """The panels of one image with boxes: itself, the truth, the prediction.

    Args:
        image: (H, W, 3) uint8.
        truth: (N, 5 or more): xmin, ymin, xmax, ymax, class; rows of a class below 0 are padding. None: it is not
            known, as of a new image, and has no panel.
        prediction: (N, 6): xmin, ymin, xmax, ymax, class, score; rows of a class below 0 are padding.
        threshold: predictions with a lower score are left out.

    Example:
        >>> image = np.zeros((4, 6, 3), np.uint8)
        >>> row = boxes(image, np.array([[0, 0, 3, 3, 7.0]]), np.array([[0, 0, 3, 3, 7, 0.9], [1, 1, 2, 2, 3, 0.1]]))
        >>> [panel.classes.tolist() for panel in row]
        [[], [7], [7]]
    """
    prediction = np.asarray(prediction, float).reshape(-1, 6)
    sure = prediction[(prediction[:, 4] >= 0) & (prediction[:, 5] >= threshold)]
    row = [
        Panel(image),
        Panel(image, sure[:, :4], sure[:, 4].astype(int), sure[:, 5], note="" if len(sure) else "nothing found"),
    ]
    if truth is not None:
        truth = np.asarray(truth, float)
        real = truth[truth[:, 4] >= 0] if truth.size else np.zeros((0, 5))
        row.insert(1, Panel(image, real[:, :4], real[:, 4].astype(int), note="" if len(real) else "no objects"))
    return row


def masks(image, truth, prediction) -> list[Panel]:
    """The panels of one image with masks: itself, the truth, the prediction.

    Args:
        image: (H, W, 3) uint8.
        truth, prediction: (H, W) integers, 0 for background; -1 does not count and is drawn grey. No `truth` (None) has
            no panel.
    """
    prediction = np.asarray(prediction)
    row = [Panel(image), Panel(image, mask=prediction, note="" if (prediction > 0).any() else "nothing found")]
    if truth is not None:
        truth = np.asarray(truth)
        row.insert(1, Panel(image, mask=truth, note="" if (truth > 0).any() else "no objects"))
    return row


def colour(label: int) -> tuple[float, float, float]:
    """The colour of a class, red, green and blue from 0 to 1; the same one in every picture."""
    from matplotlib import colors

    if label < len(_COLOURS):
        return colors.to_rgb(_COLOURS[label])
    return colorsys.hsv_to_rgb(label * 0.618034 % 1, 0.75, 0.8)  # the golden section: neighbours differ


def sheet(rows: Sequence[Sequence[Panel]], path: os.PathLike[str] | str, class_names: Sequence[str] = (),
          title: str = "", titles: Optional[Sequence[str]] = None, across: int = 1) -> Path:  # fmt: skip
    """Write rows of panels as one PNG, replaced as a whole if it is there already; returns its path.

    Args:
        rows: what :func:`boxes` and :func:`masks` return, one per image.
        path: the file; its folder is made.
        class_names: of boxes, their classes' names; of masks, those of the classes from 0, the background. Numbers
            where there are none.
        title: stands above everything.
        titles: stand above the columns; by default those of :func:`boxes`, with the truth or without.
        across: how many images stand side by side.

    Raises:
        ValueError: there are no rows.
        OutputUnavailable: the file cannot be written.
    """
    if not rows:
        raise ValueError(f"pictures: no rows for {path}; pass one list of panels per image")
    path = Path(path)
    with archive.writable(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
    write(lambda: draw(rows, class_names, title, titles, across), path, dpi=100)
    return path


def write(make_figure: Callable[[], Any], path: Path, dpi: int) -> None:
    """Write a Matplotlib figure as a PNG, replaced as a whole if it is there already."""
    with warnings.catch_warnings():
        # Matplotlib's last version for Python 3.9 calls a dependency by names that are on their way out.
        warnings.simplefilter("ignore", DeprecationWarning)
        figure = make_figure()
        archive.replace(path, lambda file: figure.savefig(file, format="png", dpi=dpi))


def draw(rows, class_names=(), title="", titles=None, across=1) -> Any:
    """:func:`sheet` as a Matplotlib figure of its own (no global state is touched), for a notebook for instance."""
    from matplotlib.figure import Figure

    titles = titles or (TITLES if len(rows[0]) == len(TITLES) else (TITLES[0], TITLES[-1]))
    columns, lines = len(titles), -(-len(rows) // across)
    shapes = [panel.image.shape for row in rows for panel in row]
    wide, tall = max(shape[1] for shape in shapes), max(shape[0] for shape in shapes)
    width, height = _SIDE * wide / max(wide, tall), _SIDE * tall / max(wide, tall)
    labels = sorted({int(v) for row in rows for panel in row if panel.mask is not None for v in np.unique(panel.mask)})
    gap, edge, head, foot = 0.06, 0.12, 0.26 + 0.3 * bool(title), 0.4 if labels else 0.0
    apart = 0.25  # between images that stand side by side
    across = min(across, len(rows))
    total_width = across * columns * (width + gap) + (across - 1) * apart + 2 * edge - gap
    total_height = lines * (height + gap) + head + foot + edge
    figure = Figure(figsize=(total_width, total_height), facecolor="white")
    if title:
        figure.text(edge / total_width, 1 - 0.16 / total_height, title, fontsize=11, fontweight="bold", color=_TEXT,
                    ha="left", va="center")  # fmt: skip
    for number, row in enumerate(rows):
        line, block = divmod(number, across)
        for column, panel in enumerate(row):
            left = edge + (block * columns + column) * (width + gap) + block * apart
            bottom = total_height - head - (line + 1) * (height + gap) + gap
            axes = figure.add_axes((left / total_width, bottom / total_height, width / total_width,
                                    height / total_height))  # fmt: skip
            _draw_panel(axes, panel, class_names)
            if line == 0:
                axes.set_title(titles[column], fontsize=9, loc="left", color=_MUTED, pad=3)
    _draw_legend(figure, labels, class_names, edge / total_width, 0.5 * foot / total_height)
    return figure


def _name(label: int, class_names: Sequence[str]) -> str:
    return class_names[label] if 0 <= label < len(class_names) else str(label)


def _draw_panel(axes: Any, panel: Panel, class_names: Sequence[str]) -> None:
    axes.imshow(panel.image if panel.mask is None else blend(panel.image, panel.mask), interpolation="nearest")
    axes.set_axis_off()
    height, width = panel.image.shape[:2]
    scores: Iterable[Any] = panel.scores if panel.scores is not None else [None] * len(panel.boxes)
    for (left, top, right, bottom), label, score in zip(panel.boxes, panel.classes, scores):
        shade = colour(int(label))
        xs = (left - 0.5, right + 0.5, right + 0.5, left - 0.5, left - 0.5)  # pixels are squares around whole numbers
        ys = (top - 0.5, top - 0.5, bottom + 0.5, bottom + 0.5, top - 0.5)
        axes.plot(xs, ys, color="white", linewidth=2.6, alpha=0.7, solid_joinstyle="miter")
        axes.plot(xs, ys, color=shade, linewidth=1.4, solid_joinstyle="miter")
        text = _name(int(label), class_names) + (f" {100 * score:.0f}%" if score is not None else "")
        # Above the box, and inside of it where the image ends.
        x, y = min(max(left - 0.5, 0), width - 1), min(max(top - 0.5, 0), height - 1)
        above = y > 0.09 * height
        axes.annotate(text, (x, y), xytext=(1, 1.5 if above else -1.5), textcoords="offset points", fontsize=6.5,
                      color="white", ha="left", va="bottom" if above else "top", fontweight="bold",
                      bbox={"facecolor": shade, "edgecolor": "none", "pad": 1.0, "alpha": 0.9})  # fmt: skip
    if panel.note:
        axes.text(0.5, 0.5, panel.note, transform=axes.transAxes, fontsize=8, color="white", ha="center", va="center",
                  bbox={"facecolor": _TEXT, "edgecolor": "none", "pad": 2.5, "alpha": 0.8})  # fmt: skip
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_ylim(height - 0.5, -0.5)


def blend(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The image in shades of grey under the colours of its mask: (H, W, 3) uint8."""
    grey = 0.35 * image.mean(axis=2, keepdims=True) / 255 + 0.15
    mixed = np.repeat(grey, 3, axis=2)
    for label in np.unique(mask):
        if label > 0:
            mixed[mask == label] = 0.25 * grey[mask == label] + 0.75 * np.array(colour(int(label) - 1))
        elif label == VOID:
            mixed[mask == label] = 0.72
    return np.clip(np.rint(255 * mixed), 0, 255).astype(np.uint8)


def _draw_legend(figure: Any, labels: Sequence[int], class_names: Sequence[str], left: float, middle: float) -> None:
    """The names of a mask's classes in their colours, in one line."""
    from matplotlib.lines import Line2D

    entries = [(colour(label - 1), _name(label, class_names)) for label in labels if label > 0]
    entries += [((0.72, 0.72, 0.72), "does not count")] if VOID in labels else []
    if not entries:
        return
    handles = [
        Line2D([], [], linestyle="", marker="s", markersize=7, color=shade, label=name) for shade, name in entries
    ]
    figure.legend(
        handles=handles, loc="center left", bbox_to_anchor=(left, middle), ncols=min(len(handles), 12), frameon=False,
        fontsize=7, labelcolor=_TEXT, handletextpad=0.1, columnspacing=1.0, borderpad=0,
    )  # fmt: skip
