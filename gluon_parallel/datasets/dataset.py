"""Data sets as the loaders take them: two parts, by name, in a folder of this machine or in an archive."""

from __future__ import annotations

import dataclasses
import gzip
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..errors import DatasetCorrupt, DatasetUnavailable
from .published import RemoteFile, fetch


class Part(NamedTuple):
    """Images with their labels; ``batches(*part, batch_size)`` takes it as it is."""

    images: np.ndarray  # (N, C, H, W) float32 in [0, 1]
    labels: np.ndarray  # (N,) int32 in [0, num_classes)


class Texts(NamedTuple):
    """Texts with their labels."""

    texts: tuple[str, ...]
    labels: np.ndarray  # (N,) int32 in [0, num_classes)


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Dataset(Generic[T]):
    """A data set of images or texts with labels, or of images with boxes or masks."""

    name: str
    train: T  # of boxes: its images all have one
    test: T
    classes: tuple[str, ...]  # what label 0, label 1, ... mean; of masks, the first is the background

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)


def find(name: str, known: Mapping[str, Any], kind: str = "") -> Any:
    """What `known` has under that name, or DatasetUnavailable, which lists the names there are."""
    if name not in known:
        raise DatasetUnavailable(f"there is no data set {name!r}{kind}; there are {', '.join(map(repr, known))}")
    return known[name]


def as_part(files: Sequence[tuple[np.ndarray, np.ndarray]], num_classes: int, where: str) -> Part:
    """Join the bytes of files into one part; DatasetCorrupt: their numbers differ or are 0, or a label is no class.

    Each file has (n, C, H, W) uint8 images (255 becomes 1.0) and (n,) labels.
    """
    num_images, labels = sum(len(images) for images, _ in files), np.concatenate([labels for _, labels in files])
    if num_images != len(labels):
        raise DatasetCorrupt(
            f"{where}: {num_images} images but {len(labels)} labels; these files do not belong together: "
            "take both from the same download"
        )
    if num_images == 0:
        raise DatasetCorrupt(f"{where}: no images at all; replace the file by the published one")
    wrong = np.flatnonzero(labels >= num_classes)
    if len(wrong):
        raise DatasetCorrupt(
            f"{where}: label {labels[wrong[0]]} of image {wrong[0]} is none of the {num_classes} classes "
            f"0..{num_classes - 1}; replace the file by the published one"
        )
    # Straight into the final array, file by file: joining the bytes first would hold the whole set twice.
    scaled, start = np.empty((num_images, *files[0][0].shape[1:]), np.float32), 0
    for images, _ in files:
        np.divide(images, np.float32(255), out=scaled[start : start + len(images)])
        start += len(images)
    return Part(scaled, labels.astype(np.int32))


ENVIRONMENT = "GLUON_PARALLEL_DATA"
_DEFAULT = "~/.gluon_parallel/datasets"


def data_folder(name: str, root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of a data set's files: `root` if it is named like it (also with "-" for "_"), else `name` in it."""
    given = Path(root if root is not None else os.environ.get(ENVIRONMENT) or _DEFAULT).expanduser()
    return given if given.name.lower().replace("-", "_") == name else given / name


def unpacked_folder(name: str, root: str | os.PathLike[str] | None, parts: tuple[str, ...], own: str = "") -> Path:
    """The folder of a data set that is too large to be downloaded: as of :func:`data_folder`, or the one around it.

    DatasetUnavailable: neither has one of its `parts`, which are folders; says what is there, and where to put them.
    `own` says what a folder of the user's own would have.
    """
    folders = data_folder(name, root), data_folder(name, root).parent
    for folder in folders:
        if any((folder / part).is_dir() for part in parts):
            return folder
    places = list(dict.fromkeys([Path(root).expanduser(), *folders] if root is not None else folders))
    looked = "; ".join(f"{place} {_content(place)}" for place in places)
    mine = f", or, of pictures of your own, {own}" if own else ""
    raise DatasetUnavailable(
        f"{name}: looked for the folder{'s' * (len(parts) > 1)} {' and '.join(parts)}{mine}. {looked}. Nothing of this "
        f"size is downloaded: put the folders there, name the folder that has them with root= (--data_root) or "
        f'{ENVIRONMENT}, or take the embedded data set, "scenes", which needs no file'
    )


def _content(folder: Path) -> str:
    """What is in a folder, in words that follow its name."""
    if not folder.is_dir():
        return "is no folder" if folder.exists() else "is not there"
    there = sorted(f"{one.name}{'/' * one.is_dir()}" for one in folder.iterdir())
    return f"has {', '.join(there[:9])}{' and more' * (len(there) > 9)}" if there else "is empty"


def obtain(
    dataset: str,
    file: RemoteFile,
    folder: Path,
    download: bool = True,
    also: Iterable[str] = (),
    embedded: str = "digits",
) -> Path:
    """Find a published file in `folder`, or download it there; DatasetUnavailable says where to put it.

    `also` are other names, of files or folders, under which the same content may lie there; the error names `dataset`,
    and recommends the `embedded` one.
    """
    for name in (*also, file.name):
        if (folder / name).exists():
            return folder / name
    reason, cause = "downloading was not asked for", None
    if download:
        try:
            return fetch(file, folder)
        except OSError as error:  # DatasetUnavailable and requests' errors are OSErrors too
            reason, cause = f"it could not be downloaded there ({error})", error
    raise DatasetUnavailable(
        f"{dataset}: {file.name} is not in {folder}, and {reason}: put the file there, name the folder that has it "
        f'with root= (--data_root) or {ENVIRONMENT}, or take the embedded data set, "{embedded}", which needs no file'
    ) from cause


def read_files(place: Path, wanted: str, most_bytes: int, dataset: str) -> Iterator[tuple[re.Match[str], bytes]]:
    """Yield the files whose names match: the match and the content. Links in an archive are not followed.

    Args:
        place: a folder, or a ``.tar.gz``, which is read once, from its beginning to its end, and not unpacked.
        wanted: regular expression of the name's end, such as ``aclImdb/train/pos/0_9.txt``.
        most_bytes: no wanted file in an archive is larger, or it is a forged one that would fill the memory.
        dataset: what the error calls that which the archive is not.

    DatasetCorrupt: an archive is damaged or none, or a file claims too much.
    """
    pattern = re.compile(f"(?:^|/){wanted}$")
    if place.is_dir():
        found = (Path(folder, name) for folder, _, names in os.walk(place, followlinks=True) for name in names)
        for path in sorted(found):
            match = pattern.search(path.relative_to(place).as_posix())
            if match and path.is_file():
                yield match, path.read_bytes()
        return
    try:
        with gzip.open(place) as plain, tarfile.open(fileobj=plain, mode="r:") as archive:
            for member in archive:  # looking for names instead would unpack it twice
                match = pattern.search(member.name)
                stream = archive.extractfile(member) if member.isfile() and match else None
                if match is None or stream is None:
                    continue
                if member.size > most_bytes:
                    raise DatasetCorrupt(f"{place}: {member.name} claims {member.size} bytes; this is not {dataset}")
                yield match, stream.read()
            plain.read()  # lets gzip compare its checksum, which stands at the end
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DatasetCorrupt(
            f"{place}: damaged or cut off, or no gzipped tar archive ({error}); delete it, so that it is downloaded "
            "again, or replace it"
        ) from error
