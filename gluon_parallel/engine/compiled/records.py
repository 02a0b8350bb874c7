"""Records: memory with named fields, which Python and compiled code read and write alike."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

_KINDS = {int: ctypes.c_int64, float: ctypes.c_double, "int": ctypes.c_int64, "float": ctypes.c_double}


def several(num: int, kind: Any = ctypes.c_int64) -> Any:
    """Stands behind a field of type ``ctypes.Array``: it has so many values of that kind."""
    return kind * num


class _Declared(type(ctypes.Structure)):  # type: ignore[misc]
    """Makes the fields of a C structure from a class's annotations; other attributes cannot be set."""

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        annotations = namespace.get("__annotations__", {})
        fields: list[tuple[str, Any]] = []
        for field, kind in annotations.items():
            given = namespace.pop(field, _KINDS.get(kind))
            fields += dict.fromkeys(given, _KINDS[int]).items() if isinstance(given, tuple) else [(field, given)]
        return super().__new__(cls, name, bases, {**namespace, "__slots__": (), "_fields_": fields})


if TYPE_CHECKING:
    from ctypes import Structure as _Structure
else:
    _Structure = _Declared("_Structure", (ctypes.Structure,), {})


class Record(_Structure):
    """Memory with named fields of 8 bytes, zero at first: ``int``, ``float``, or :func:`several`.

    A tuple of names in the place of a field stands for as many ``int`` fields.

    Compiled code gets the address, see ``access.record_at``; an address keeps nothing alive. A file that declares
    records is named in ``library.SOURCES``.

    Example:
        >>> class Shape(Record):
        ...     num_axes: int
        ...     scale: float
        ...     lengths: ctypes.Array = several(3)
        >>> shape = Shape(num_axes=2, scale=0.5)
        >>> shape.lengths[:2] = 4, 5
        >>> Shape.from_address(address_of(shape)).lengths[1], Shape.lengths.offset, ctypes.sizeof(Shape)
        (5, 16, 40)
        >>> shape.num_axis = 3
        Traceback (most recent call last):
        AttributeError: 'Shape' object has no attribute 'num_axis'...
    """


def address_of(memory: Any) -> int:
    """Where the memory of a NumPy array, a record or a ctypes array begins; its owner keeps it alive."""
    return ctypes.addressof(memory) if isinstance(memory, (ctypes.Structure, ctypes.Array)) else memory.ctypes.data
