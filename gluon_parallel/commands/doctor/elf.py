"""Libraries that a shared library asks for, read from its file (ELF, 64 bit, little endian)."""

from __future__ import annotations

import os
import struct

_LOAD, _DYNAMIC = 1, 2  # types of segments
_NEEDED, _STRINGS = 1, 5  # tags of the dynamic section


def needed(path: os.PathLike) -> list[str]:
    """The names of the libraries that the loader looks for when it loads this one; nothing of it is run.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no shared library of 64 bits.
    """
    with open(path, "rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is no shared library of 64 bits")
        file.seek(32)
        (start,) = struct.unpack("<Q", file.read(8))
        file.seek(54)
        size, count = struct.unpack("<HH", file.read(4))
        segments = []
        for number in range(count):
            file.seek(start + number * size)
            kind, _, offset, address, _, length = struct.unpack("<IIQQQQ", file.read(40))
            segments.append((kind, offset, address, length))
        entries = []
        for kind, offset, _, length in segments:
            if kind == _DYNAMIC:
                file.seek(offset)
                entries = list(struct.iter_unpack("<qQ", file.read(length - length % 16)))
        addresses = [value for tag, value in entries if tag == _STRINGS]
        names = []
        for tag, value in entries:
            if tag == _NEEDED and addresses:
                file.seek(_offset(segments, addresses[0]) + value)
                names.append(file.read(256).partition(b"\0")[0].decode())
    return names


def _offset(segments: list[tuple[int, int, int, int]], address: int) -> int:
    """Where in the file is what the loader puts at an address."""
    for kind, offset, start, length in segments:
        if kind == _LOAD and start <= address < start + length:
            return offset + address - start
    raise ValueError(f"address {address:#x} is in no segment")
