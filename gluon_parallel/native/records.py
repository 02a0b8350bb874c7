"""Records and constants of the C headers, as ctypes structures and numbers: each is declared once, in its header."""

from __future__ import annotations

import ctypes
import graphlib
import re
import types
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent
_KINDS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "double": ctypes.c_double, "char": ctypes.c_char}
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_DECLARATION = re.compile(
    r"typedef struct (?P<record>\w+) \{(?P<fields>.*?)\n\} \w+;|enum \{(?P<names>.*?)\}|"
    r"#define (?P<name>\w+) +\(?(?P<value>-?\d+)\b",
    re.DOTALL,
)


class Record(ctypes.Structure):
    """Memory with named fields, zero at first. A pointer in C is an address here; its target is kept alive elsewhere.

    Example:
        >>> line = C.Line(bell=3)
        >>> C.Line.from_address(address_of(line)).bell
        3
        >>> line.bel = 4
        Traceback (most recent call last):
        AttributeError: 'Line' object has no attribute 'bel'...
    """

    __slots__ = ()


def _read_headers() -> Any:
    found = types.SimpleNamespace()
    texts = {path.name: _COMMENT.sub("", path.read_text("utf-8")) for path in sorted(_FOLDER.glob("[!.]*.h"))}
    included = {name: re.findall(r'#include "(\w+\.h)"', text) for name, text in texts.items()}
    for header in graphlib.TopologicalSorter(included).static_order():
        for declaration in _DECLARATION.finditer(texts[header]):
            if declaration["record"]:
                fields = list(_fields(declaration["fields"], found))
                kind = type(declaration["record"], (Record,), {"__slots__": (), "_fields_": fields})
                setattr(found, declaration["record"], kind)
            elif declaration["name"]:
                setattr(found, declaration["name"], int(declaration["value"]))
            else:
                number = -1
                for one in filter(None, (part.strip() for part in declaration["names"].split(","))):
                    name, _, value = one.partition("=")
                    number = int(value) if value else number + 1
                    setattr(found, name.strip(), number)
    return found


def _fields(text: str, known: Any) -> Any:
    """Names and ctypes of the fields of a record."""
    for declaration in filter(None, (part.strip() for part in text.split(";"))):
        function = re.search(r"\(\*(\w+)\)\(", declaration)
        if function:
            yield function[1], ctypes.c_int64
            continue
        kind, _, names = re.sub(r"\b(const|struct|_Atomic|unsigned)\b", "", declaration).strip().partition(" ")
        for name in names.split(","):
            parts = re.fullmatch(r"\s*(\**[\s*]*)(\w+)((?:\[\w+\])*)", name)
            assert parts, declaration
            one: Any = ctypes.c_int64 if parts[1].strip() else _KINDS.get(kind) or getattr(known, kind)
            for length in reversed(re.findall(r"\w+", parts[3])):
                one = one * (int(length) if length.isdecimal() else getattr(known, length))
            yield parts[2], one


def address_of(memory: Any) -> int:
    """Where the memory of a NumPy array, a record or a ctypes array begins; its owner keeps it alive."""
    return ctypes.addressof(memory) if isinstance(memory, (ctypes.Structure, ctypes.Array)) else memory.ctypes.data


C = _read_headers()  # all records and integer constants of the headers, by name
