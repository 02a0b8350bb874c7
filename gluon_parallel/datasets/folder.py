"""Files of a data set: their folder on this machine, the archives that hold them, the error where they are missing."""

from __future__ import annotations

import gzip
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import DatasetCorrupt, DatasetUnavailable
from .published import RemoteFile, fetch

ENVIRONMENT = "GLUON_PARALLEL_DATA"
_DEFAULT = "~/.gluon_parallel/datasets"


def data_folder(name: str, root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of a data set's files: `root` if it is named like it (also with "-" for "_"), else `name` in it.

    Example:
        >>> data_folder("mnist", "/data").as_posix(), data_folder("fashion_mnist", "/data/fashion-mnist").as_posix()
        ('/data/mnist', '/data/fashion-mnist')
    """
    given = Path(root if root is not None else os.environ.get(ENVIRONMENT) or _DEFAULT).expanduser()
    return given if given.name.lower().replace("-", "_") == name else given / name


def unpacked_folder(name: str, root: str | os.PathLike[str] | None, parts: tuple[str, ...]) -> Path:
    """The folder of a data set that is too large to be downloaded: as of :func:`data_folder`, or the one around it.

    DatasetUnavailable: neither has one of its `parts`, which are folders; says where to put them.
    """
    for folder in (data_folder(name, root), data_folder(name, root).parent):
        if any((folder / part).is_dir() for part in parts):
            return folder
    raise DatasetUnavailable(
        f"{name}: {' and '.join(parts)} are not in {data_folder(name, root)}, and nothing of this size is downloaded: "
        f"put the published folders there, name the folder that has them with root= (--data_root) or {ENVIRONMENT}, or "
        'take the embedded data set, "scenes", which needs no file'
    )


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
