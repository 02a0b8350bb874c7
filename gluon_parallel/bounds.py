"""Whole numbers that users write, in flags, files and variables: read within bounds, and shown in errors.

It imports no MXNet, since the command line reads its words before MXNet is imported.
"""

import argparse
import numbers
import re
from typing import Any

MOST = (1 << 63) - 1  # what C's long has room for
PROCESSES, DEVICES = 1 << 16, 1 << 10  # the most that a group may have, and a process
_LENGTH = 80  # characters of a value in an error


def shown(value: Any) -> str:
    """A value for an error, cut where it is long.

    Example:
        >>> shown("epochs"), len(shown("9" * 5000))
        ("'epochs'", 80)
    """
    try:
        text = repr(value)
    except ValueError:  # Python writes no numbers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _LENGTH else f"{text[: _LENGTH - 3]}..."


def whole(name: str, value: Any, least: int, most: int = MOST, error: type[Exception] = ValueError) -> int:
    """A whole number within bounds, from a number or a text of digits.

    Raises:
        error: it is no whole number from `least` to `most`; the text begins with `name`.

    Example:
        >>> whole("-n", "2", least=1), whole("-n", 2, least=1)
        (2, 2)
        >>> whole("-n", "9" * 5000, least=1, most=8)
        Traceback (most recent call last):
        ValueError: -n is '9999999999999999999999999999999999999999999999999999999999999999999999999999..., wanted a whole number from 1 to 8
    """  # noqa: E501
    digits = isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,19}\s*", value)
    if digits or (isinstance(value, numbers.Integral) and not isinstance(value, bool)):
        if least <= int(value) <= most:
            return int(value)
    raise error(f"{name} is {shown(value)}, wanted {in_words(least, most)}")


def in_words(least: int, most: int = MOST) -> str:
    """What :func:`whole` wants.

    Example:
        >>> in_words(1), in_words(0), in_words(1, 1024)
        ('a whole number above 0', 'a whole number, 0 or more', 'a whole number from 1 to 1024')
    """
    if most < MOST:
        return f"a whole number from {least} to {most}"
    return f"a whole number, {least} or more" if least != 1 else "a whole number above 0"


def flag(text: str) -> int:
    """A whole number after a flag, as a type of argparse; the command checks the flag's own bounds."""
    try:
        return whole("it", text, -MOST)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no whole number of up to 19 digits") from None
