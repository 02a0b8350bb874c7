"""Files of a published data set, read out of its gzipped tar archive or out of the folder that it was unpacked to."""

import gzip
import os
import re
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import DatasetCorrupt


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
