"""Modes by name, from ``sync`` (workers wait at every step) to ``async`` (never), and their one option."""

import difflib
import math
from typing import NamedTuple, Optional

from ..errors import ConfigError


class _Kind(NamedTuple):
    value: Optional[str]  # what the number after the colon means; None: there is none
    default: float
    whole: bool
    least: float
    colour: str


_KINDS = {
    "sync": _Kind(None, 0, True, 0, "#1f2933"),
    "backup": _Kind("how many of the slowest gradients each step does without", 1, True, 0, "#7b8794"),
    "ssp": _Kind("how many steps a worker may be ahead of the slowest", 2, True, 0, "#2a6f97"),
    "local": _Kind("steps between two averages of the weights", 8, True, 1, "#588157"),
    "elastic": _Kind(
        "how strongly all workers together and the centre attract each other (0 to 1)", 0.9, False, 0, "#b8860b"
    ),
    "async": _Kind(None, 0, True, 0, "#c8102e"),
    "dc": _Kind("lambda, the strength of the compensation", 0.04, False, 0, "#e07a5f"),
}
MODES = tuple(_KINDS)


class Mode(NamedTuple):
    """A mode and its number."""

    name: str  # one of MODES
    value: float  # what it means depends on the name; 0 where it means nothing

    @property
    def colour(self) -> str:
        """The mode's colour in every plot."""
        return _KINDS[self.name].colour

    def __str__(self) -> str:
        return self.name if _KINDS[self.name].value is None else f"{self.name}:{self.value:g}"


def parse_mode(text: str) -> Mode:
    """Read a setting such as ``"ssp:2"``.

    Args:
        text: a name, and after a colon its number if it has one:
            ``sync`` (every step waits for all workers), ``backup:b`` (... for all but the slowest b), ``ssp:s`` (a
            worker may be s steps ahead of the slowest), ``local:H`` (weights are averaged after every H steps),
            ``elastic:beta`` (workers and centre pull each other: EASGD), ``async`` (nobody waits), ``dc:lambda``
            (nobody waits, and gradients are compensated for their delay: DC-ASGD).

    Raises:
        ConfigError: there is no such mode, or its number makes no sense.

    Example:
        >>> parse_mode("ssp:3"), str(parse_mode("local"))
        (Mode(name='ssp', value=3), 'local:8')
    """
    name, colon, number = str(text).strip().lower().partition(":")
    if name not in _KINDS:
        close = difflib.get_close_matches(name, MODES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"mode: {text!r} is none of the modes; {hint}The right ones are {', '.join(MODES)}")
    kind = _KINDS[name]
    if not colon:
        return Mode(name, kind.default)
    if kind.value is None:
        raise ConfigError(f"mode: {text!r}: {name} has no number; write {name}")
    try:
        value = int(number) if kind.whole else float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= kind.least) or (name == "elastic" and value > 1):
        wanted = f"{'a whole number' if kind.whole else 'a number'}, {kind.least:g} or more"
        raise ConfigError(f"mode: {text!r}: {number!r} is not {wanted}; it says {kind.value}")
    return Mode(name, value)
