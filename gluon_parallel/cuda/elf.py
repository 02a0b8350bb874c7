"""What a shared library says about itself, read from its file (ELF, 64 bit, little endian); nothing of it is run."""

from __future__ import annotations

import os
import struct
from typing import Any, Optional

_NEEDED = 1  # tag of the dynamic section: the name of a library


class Library:
    """A shared library, open for reading.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no shared library of 64 bits.
    """

    def __init__(self, path: os.PathLike):
        self.file = open(path, "rb")
        if self.file.read(6) != b"\x7fELF\x02\x01":
            self.file.close()
            raise ValueError(f"{path} is no shared library of 64 bits")

    def __enter__(self) -> Library:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def unpack(self, offset: int, form: str) -> tuple[Any, ...]:
        """The numbers that stand at `offset`."""
        self.file.seek(offset)
        data = self.file.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            raise ValueError(f"{self.file.name} is cut off")
        return struct.unpack(form, data)

    def _text(self, offset: int) -> str:
        self.file.seek(offset)
        return self.file.read(256).partition(b"\0")[0].decode()

    def needed(self) -> list[str]:
        """The names of the libraries that the loader looks for when it loads this one."""
        dynamic, strings = self.section(".dynamic"), self.section(".dynstr")
        if dynamic is None or strings is None:
            return []
        numbers = self.unpack(dynamic[0], f"<{dynamic[1] // 8}Q")
        return [self._text(strings[0] + value) for tag, value in zip(numbers[::2], numbers[1::2]) if tag == _NEEDED]

    def section(self, name: str) -> Optional[tuple[int, int]]:
        """(offset, length) of a section in the file; None if there is none of that name."""
        (start,) = self.unpack(40, "<Q")
        size, count, names = self.unpack(58, "<HHH")
        sections = [self.unpack(start + number * size, "<IIQQQQ") for number in range(count)]
        for word, _, _, _, offset, length in sections:
            if self._text(sections[names][4] + word) == name:
                return offset, length
        return None
