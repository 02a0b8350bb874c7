"""Files out of a gzipped tar archive, in the order in which they stand there, and damaged archives named."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

from ..errors import DatasetCorrupt


def unpack(path: Path, wanted: Callable[[str], bool], most_bytes: int, dataset: str) -> Iterator[tuple[str, bytes]]:
    """Read the wanted files of an archive.

    Args:
        path: a ``.tar.gz``.
        wanted: function of a file's name in the archive (``aclImdb/train/pos/0_9.txt``).
        most_bytes: no wanted file is larger, or the archive is a forged one that would fill the memory.
        dataset: what the error calls that which the archive is not.

    Returns:
        Names and contents. The archive is read once, from its beginning to its end.

    Raises:
        DatasetCorrupt: it is damaged, cut off, or no such archive; or a file claims to be too large.
    """
    try:
        with gzip.open(path) as plain, tarfile.open(fileobj=plain, mode="r:") as archive:
            for member in archive:  # looking for names instead would unpack it twice
                stream = archive.extractfile(member) if member.isfile() and wanted(member.name) else None
                if stream is None:
                    continue
                if member.size > most_bytes:
                    raise DatasetCorrupt(f"{path}: {member.name} claims {member.size} bytes; this is not {dataset}")
                yield member.name, stream.read()
            plain.read()  # lets gzip compare its checksum, which stands at the end
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DatasetCorrupt(
            f"{path}: damaged or cut off, or no gzipped tar archive ({error}); delete it, so that it is downloaded "
            "again, or replace it"
        ) from error
