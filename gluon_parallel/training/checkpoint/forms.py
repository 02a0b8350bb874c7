"""Forms of the facts in a checkpoint: its keys and the types of their values, checked before any is used."""

from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

from ...bounds import MOST, shown
from ...errors import CheckpointError


class Kind(NamedTuple):
    """A kind of single values."""

    words: str
    allows: Callable[[Any], bool]


class Each(NamedTuple):
    """A dict from any texts, or a list, of values of one form."""

    form: Any
    type: type = dict


class OrNone(NamedTuple):
    """None or a value of a form."""

    form: Any


class OrMissing(NamedTuple):
    """The form of a key that may be missing."""

    form: Any


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= MOST)


NUMBER = Kind("a number", _is_number)
COUNT = Kind("a whole number, 0 or more", lambda value: type(value) is int and 0 <= value <= MOST)
TEXT = Kind("a text", lambda value: isinstance(value, str))
_ANYTHING = Kind("anything", lambda value: True)
_OBJECT = Each(_ANYTHING)

_LOOP = {
    **dict.fromkeys(("epoch", "step", "steps", "best_epoch", "epochs_since_best", "num_samples"), COUNT),
    "best": OrNone(NUMBER),
    "seed": NUMBER,
    "sums": Each(NUMBER),
    "metrics": OrMissing(Each(Each(NUMBER, list))),
    "loaders": Each((COUNT, COUNT, COUNT), list),
}
CHECKPOINT = {
    "state": OrMissing(_OBJECT),
    "own": OrMissing(_OBJECT),
    "objects": OrMissing(Each(_OBJECT)),
    "loop": OrMissing(OrNone(_LOOP)),
}
STATE = {
    "net": OrMissing(TEXT),
    "optimizer": OrMissing(
        {
            "name": TEXT,
            "values": Each(OrNone(NUMBER)),
            "counts": Each(COUNT),
            "stateful": Each(TEXT, list),
            "scheduler": OrNone(Each(OrNone(NUMBER))),
            "loss_scaler": OrMissing(OrNone(Each(OrNone(NUMBER)))),
        }
    ),
}


def check(value: Any, form: Any, source: str, where: str = "its facts") -> None:
    """CheckpointError: `value` is not of that form, in which a dict lists the keys; other keys may have any values.

    Example:
        >>> check({"epoch": -1}, {"epoch": COUNT}, "a.npz")
        Traceback (most recent call last):
        gluon_parallel.errors.CheckpointError: a.npz is damaged: its facts, epoch: -1, wanted a whole number, 0 or more
    """

    def refuse(words: str) -> None:
        raise CheckpointError(f"{source} is damaged: {where}: {shown(value)}, wanted {words}")

    if isinstance(form, (OrNone, OrMissing)):
        if isinstance(form, OrMissing) or value is not None:
            check(value, form.form, source, where)
    elif isinstance(form, Kind):
        if not form.allows(value):
            refuse(form.words)
    elif isinstance(form, tuple) and not isinstance(form, Each):
        if not isinstance(value, (list, tuple)) or len(value) != len(form):
            refuse(f"a list of {len(form)}")
        for number, one in enumerate(form):
            check(value[number], one, source, f"{where}, {number}")
    elif isinstance(form, Each) and form.type is list:
        if not isinstance(value, (list, tuple)):
            refuse("a list")
        for number, one in enumerate(value):
            check(one, form.form, source, f"{where}, {number}")
    elif not isinstance(value, Mapping):
        refuse("names and values")
    elif isinstance(form, Each):
        for key, one in value.items():
            check(one, form.form, source, f"{where}, {shown(key)}")
    else:
        for key, one in form.items():
            if key in value:
                check(value[key], one, source, f"{where}, {key}")
            elif not isinstance(one, OrMissing):
                raise CheckpointError(f"{source} is damaged: {where} have no {key!r}")
