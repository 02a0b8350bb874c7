"""The compute capabilities for which a library holds GPU code, read from its fat binaries."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .libraries import sections

_HEADER, _ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIII")
_MAGIC = 0xBA55ED50
_PTX, _MACHINE_CODE = 1, 2  # kinds of entries


class Code(NamedTuple):
    """What the compiler made for one compute capability."""

    capability: int  # 86 for 8.6
    is_ptx: bool  # which the driver compiles for newer cards; machine code runs within one major version only


# Of the wheels mxnet-cu112 and mxnet-cu117.
WHEELS = tuple(Code(capability, False) for capability in (50, 60, 70, 80, 86))


def read(path: os.PathLike) -> tuple[Code, ...]:
    """What the first fat binary of a library holds (MXNet's have all the same); errors as of :func:`sections`."""
    return tuple(sorted(set(_entries(sections(path).get(".nv_fatbin", memoryview(b""))))))


def _entries(section: memoryview) -> Iterator[Code]:
    if len(section) < _HEADER.size:
        return
    magic, _, offset, size = _HEADER.unpack_from(section)
    end = offset + size
    if magic != _MAGIC or end > len(section):
        return
    while offset + _ENTRY.size <= end:
        kind, _, header, size, _, _, _, capability = _ENTRY.unpack_from(section, offset)
        if kind in (_PTX, _MACHINE_CODE):
            yield Code(capability, kind == _PTX)
        if not header:  # no entry; going on from here would never end
            return
        offset += header + size


def runs_on(code: Iterable[Code], capability: int) -> bool:
    """Whether a card of this compute capability can run it.

    Example:
        >>> [runs_on(WHEELS, capability) for capability in (37, 50, 75, 89, 90)]
        [False, True, True, True, False]
        >>> runs_on([Code(80, True)], 90)
        True
    """
    return any(
        one.capability <= capability and (one.is_ptx or one.capability // 10 == capability // 10) for one in code
    )


def dotted(capability: int) -> str:
    """A compute capability as it is written, 8.6 for 86."""
    return f"{capability // 10}.{capability % 10}"


def describe(code: Iterable[Code]) -> str:
    """The capabilities in words."""
    return ", ".join(f"{'PTX of ' * one.is_ptx}{dotted(one.capability)}" for one in code)
