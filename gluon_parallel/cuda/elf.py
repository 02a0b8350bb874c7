"""What a shared library says about itself, read from its file (ELF, 64 bit, little endian); nothing of it is run."""

from __future__ import annotations

import mmap
import os
import struct

_NEEDED = 1  # tag of the dynamic section: the name of a library


def sections(path: os.PathLike) -> dict[str, memoryview]:
    """The sections of a shared library by their names, as parts of its file, which is mapped into memory.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no shared library of 64 bits, or cut off.
    """
    with open(path, "rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no shared library of 64 bits")
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        (start,) = struct.unpack_from("<Q", data, 40)
        size, count, names = struct.unpack_from("<HHH", data, 58)
        rows = [struct.unpack_from("<IIQQQQ", data, start + number * size) for number in range(count)]
    except struct.error as error:
        raise ValueError(f"{path} is cut off") from error
    return {_text(data, rows[names][4] + word): data[offset : offset + length] for word, *_, offset, length in rows}


def _text(data: memoryview, offset: int) -> str:
    return bytes(data[offset : offset + 256]).partition(b"\0")[0].decode()


def needed(path: os.PathLike) -> list[str]:
    """The names of the libraries that the loader looks for when it loads this one; errors as of :func:`sections`."""
    found = sections(path)
    if ".dynamic" not in found or ".dynstr" not in found:
        return []
    dynamic = found[".dynamic"]
    numbers = struct.unpack_from(f"<{len(dynamic) // 8}Q", dynamic)
    return [_text(found[".dynstr"], value) for tag, value in zip(numbers[::2], numbers[1::2]) if tag == _NEEDED]
