"""Scenes made of handwritten digits on photographs, written as a data set in the layout of Pascal VOC."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import DatasetUnavailable
from .dataset import ENVIRONMENT, data_folder
from .indexed import Image
from .labelled import DIGITS, stratified_split

CLASSES = DIGITS
VOID = 255  # in a mask: the soft edge of a digit, which is neither digit nor background
_SIDES = (0.2, 0.48)  # of a digit, as shares of the scene's side
_MOST_DIGITS = 5
_VISIBLE = 0.75  # of every digit at least; a scene in which one digit hides another teaches nothing
_MAX_ROTATION = 12  # degrees to either side: a 6 stays a 6
_TRIES = 30  # to find a place for a digit, before the scene does without it
_LEAST_SIZE = 32
_SHARPEN, _THRESHOLD = 0.8, 0.42  # chosen by eye


class Scene(NamedTuple):
    """A picture and what is to be seen on it."""

    image: np.ndarray  # (S, S, 3) uint8
    boxes: np.ndarray  # (N, 4) int: xmin, ymin, xmax, ymax, 0-based and inclusive, of what is visible
    labels: np.ndarray  # (N,) int
    occluded: np.ndarray  # (N,) bool: another digit covers a part of it
    class_mask: np.ndarray  # (S, S) uint8: 0 background, 1 + label, VOID
    object_mask: np.ndarray  # (S, S) uint8: 0 background, 1 + the box's number, VOID


def write(
    root: str | os.PathLike[str] | None = None, num_train: int = 600, num_test: int = 150, size: int = 128,
    seed: int = 0,
) -> Path:  # fmt: skip
    """Write scenes of scikit-learn's handwritten digits on its sample photographs, once.

    The digits of the test scenes occur in no training scene; photographs there are only two, so both parts show
    parts of the same ones. Nothing is downloaded. Several processes may call this at the same time.

    Args:
        root: the folder of all sets of scenes, or where `data_folder` looks for it.
        num_train, num_test: scenes in ``ImageSets/*/train.txt`` and ``test.txt``.
        size: pixels per side.
        seed: the same seed gives the same scenes.

    Returns:
        The folder, which is one of `root` named after the arguments: it has JPEGImages, Annotations,
        SegmentationClass, SegmentationObject and ImageSets. When this has been written before, nothing is done.

    Raises:
        DatasetUnavailable: the folder cannot be written to.
        ValueError: a number is too small.
    """
    for name, value, least in (("num_train", num_train, 1), ("num_test", num_test, 1), ("size", size, _LEAST_SIZE)):
        if value < least:
            raise ValueError(f"scenes.write: {name}={value!r}; expected at least {least}")
    folder = data_folder("scenes", root) / f"{size}px-{num_train}-{num_test}-seed{seed}"
    if folder.exists():
        return folder
    unfinished = folder.with_name(f".unfinished-{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise DatasetUnavailable(
            f"scenes: they are written to {folder.parent}, which is not possible ({error}); name another folder with "
            f"root= (--data_root) or {ENVIRONMENT}"
        ) from error
    try:
        _write_all(unfinished, {"train": num_train, "test": num_test}, size, seed)
        unfinished.rename(folder)  # complete or not there at all
    except OSError:
        if not folder.exists():  # otherwise another process was faster
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _write_all(folder, numbers, size, seed):
    from sklearn.datasets import load_digits, load_sample_images

    for name in ("JPEGImages", "Annotations", "SegmentationClass", "SegmentationObject"):
        (folder / name).mkdir()
    photographs, source = load_sample_images().images, load_digits()
    parts = stratified_split(source.target)
    for part, (split, number) in enumerate(numbers.items()):
        digits, labels = source.images[parts[part]] / 16, source.target[parts[part]]
        names = []
        for index in range(number):
            random = np.random.RandomState([seed, part, index])  # NumPy has frozen its stream
            names.append(f"{split}_{index:06d}")
            _save(folder, names[-1], draw(photographs, digits, labels, size, random))
        for kind in ("Main", "Segmentation"):
            (folder / "ImageSets" / kind).mkdir(parents=True, exist_ok=True)
            (folder / "ImageSets" / kind / f"{split}.txt").write_text("".join(f"{name}\n" for name in names))


def draw(photographs, digits, labels, size: int, random: np.random.RandomState) -> Scene:
    """Put one to five digits on a part of a photograph; each lies inside, and at least 75 % of its pixels are visible.

    `photographs` are (H, W, 3) uint8 each, `digits` (N, 8, 8) in [0, 1]; `size` is in pixels per side.
    """
    image = _background(photographs[random.randint(len(photographs))], size, random)
    objects = np.zeros((size, size), np.uint8)  # whose pixel it is; 0 is nobody's
    soft = np.zeros((size, size), bool)
    areas: list[int] = []
    chosen: list[int] = []
    for _ in range(random.randint(1, _MOST_DIGITS + 1)):
        for _attempt in range(_TRIES):
            which = random.randint(len(digits))
            alpha = _stroke(digits[which], size, random)
            height, width = alpha.shape
            top, left = random.randint(size - height + 1), random.randint(size - width + 1)
            place = (slice(top, top + height), slice(left, left + width))
            solid, edge = alpha >= 0.5, (alpha > 0.05) & (alpha < 0.5)
            after = objects.copy()
            after[place][solid] = len(areas) + 1
            seen = np.bincount(after.ravel(), minlength=len(areas) + 2)[1:]
            if all(seen >= _VISIBLE * np.array([*areas, solid.sum()])):
                break
        else:
            continue
        image[place] = _tinted(image[place], alpha, random)
        soft[place] = np.where(solid, False, soft[place] | edge)
        objects = after
        areas.append(int(solid.sum()))
        chosen.append(which)
    boxes = np.array([_bounds(objects == number + 1) for number in range(len(areas))]).reshape(-1, 4)
    seen = np.bincount(objects.ravel(), minlength=len(areas) + 1)[1:]
    classes = np.concatenate([[0], labels[chosen] + 1]).astype(np.uint8)[objects]
    # The object's pixels stay its own where the soft edge of a later digit touches them, but they teach no class.
    return Scene(
        image=np.rint(image * 255).astype(np.uint8),
        boxes=boxes,
        labels=labels[chosen],
        occluded=seen < np.array(areas),
        class_mask=np.where(soft, VOID, classes).astype(np.uint8),
        object_mask=np.where(soft & (objects == 0), VOID, objects).astype(np.uint8),
    )


def _background(photograph, size, random):
    """A square part of a photograph, as (size, size, 3) in [0, 1]."""
    height, width = photograph.shape[:2]
    side = int(height * random.uniform(0.35, 1.0))
    top, left = random.randint(height - side + 1), random.randint(width - side + 1)
    part = Image.fromarray(photograph[top : top + side, left : left + side])
    values = np.asarray(part.resize((size, size), Image.Resampling.LANCZOS), np.float32) / 255
    return values[:, ::-1].copy() if random.rand() < 0.5 else values.copy()


def _stroke(digit, size, random):
    """How much of each pixel one digit covers: (h, w) in [0, 1], cut to what is solid or soft of it."""
    side = size * np.exp(random.uniform(*np.log(_SIDES)))  # as many small digits as large ones, on a scale of ratios
    shape = (max(8, int(side * random.uniform(0.75, 1.0))), max(8, int(side)))
    framed = Image.fromarray(_sharpened(np.pad(digit, 1)))
    large = framed.resize((shape[0] * 10 // 8, shape[1] * 10 // 8), Image.Resampling.BICUBIC)
    turned = large.rotate(random.uniform(-_MAX_ROTATION, _MAX_ROTATION), Image.Resampling.BICUBIC, expand=True)
    # A steep curve makes pen strokes of blurred ones; what is left of their edge is about a pixel wide.
    alpha = np.clip((np.asarray(turned) - _THRESHOLD) * (side / 10) + 0.5, 0, 1)
    xmin, ymin, xmax, ymax = _bounds(alpha >= 0.5)
    xmin, ymin = max(0, xmin - 1), max(0, ymin - 1)
    return alpha[ymin : ymax + 2, xmin : xmax + 2]


def _sharpened(digit):
    """A digit of 8x8 with more contrast to its neighbours, so that holes stay open and thin strokes closed."""
    around = np.pad(digit, 1)
    rows, columns = digit.shape
    mean = sum(around[y : y + rows, x : x + columns] for y in range(3) for x in range(3)) / 9
    return (digit + _SHARPEN * (digit - mean)).astype(np.float32)


def _tinted(background, alpha, random):
    """The digit in a colour of its own, far from that of what it lies on."""
    colours = random.rand(8, 3).astype(np.float32)
    distance = np.abs(colours - background.mean((0, 1))).sum(1)
    colour = colours[distance.argmax()]
    return background + alpha[..., None] * (colour - background)


def _bounds(mask):
    """xmin, ymin, xmax, ymax of the pixels that are set, inclusive."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])


def _save(folder, name, scene):
    Image.fromarray(scene.image).save(folder / "JPEGImages" / f"{name}.jpg", quality=95, subsampling=0)
    for kind, mask in (("SegmentationClass", scene.class_mask), ("SegmentationObject", scene.object_mask)):
        picture = Image.fromarray(mask)  # one byte per pixel; the palette makes colours of them for the eye
        picture.putpalette(_PALETTE)
        picture.save(folder / kind / f"{name}.png", optimize=True)
    (folder / "Annotations" / f"{name}.xml").write_text(_annotation(name, scene))


def _annotation(name, scene):
    height, width, depth = scene.image.shape
    objects = "".join(
        f"\t<object>\n\t\t<name>{CLASSES[label]}</name>\n\t\t<pose>Unspecified</pose>\n\t\t<truncated>0</truncated>\n"
        f"\t\t<occluded>{int(occluded)}</occluded>\n\t\t<difficult>0</difficult>\n\t\t<bndbox>"
        + "".join(f"<{edge}>{at + 1}</{edge}>" for edge, at in zip(("xmin", "ymin", "xmax", "ymax"), box))
        + "</bndbox>\n\t</object>\n"
        for box, label, occluded in zip(scene.boxes, scene.labels, scene.occluded)
    )
    return f"""<annotation>
\t<folder>scenes</folder>
\t<filename>{name}.jpg</filename>
\t<size><width>{width}</width><height>{height}</height><depth>{depth}</depth></size>
\t<segmented>1</segmented>
{objects}</annotation>
"""


# VOC's colours: the bits of a number are dealt out to red, green and blue, from the highest down.
_PALETTE = [
    sum((number >> (3 * bit + channel) & 1) << (7 - bit) for bit in range(3))
    for number in range(256)
    for channel in range(3)
]
