"""Marks of gradients: which copies the newest backward pass over the devices has written.

`native/marks.c` has the rule. MXNet's own mark (``_fresh_grad``) tells that some pass has written a copy, maybe one
that no step has used.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from ..mxnet.arrays import addresses_of, set_fresh
from ..mxnet.compat import mx
from ..mxnet.library import replace_c_function
from ..mxnet.parameters import checked_values, gradients_of, values_of
from ..native import function, library
from ..native.records import C, address_of

get_marks = function("gp_get_marks", 4, keeps_lock=True)
set_marks = function("gp_set_marks", 4, keeps_lock=True)
_watch, _unwatch = function("gp_watch", 1, keeps_lock=True), function("gp_unwatch", 1, keeps_lock=True)
replace_c_function("MXAutogradBackwardEx", library().gp_go_backward)


class _Location(NamedTuple):
    """Where the marks of a parameter are."""

    marks: Callable[[], Marks | None]
    number: int  # of the parameter
    arrays: list[mx.nd.NDArray]  # its values; others have other marks


_locations: weakref.WeakKeyDictionary[mx.gluon.Parameter, _Location] = weakref.WeakKeyDictionary()


class Marks:
    """The marks of the gradients of parameters that are trained together, each on as many devices.

    Attributes:
        record: address for :func:`get_marks` and :func:`set_marks`.
        fresh: (parameters, devices), memory for the result of :func:`get_marks`.
        passes: (devices,), how many backward passes over each device have reached any of the parameters. The user sets
            them to 0. Not counted on one device without `is_one_of_several`, other processes.
    """

    def __init__(self, parameters: Sequence[mx.gluon.Parameter], is_one_of_several: bool = False) -> None:
        values = [checked_values(parameter) for parameter in parameters]
        for parameter in parameters:
            _unmark_stale(parameter)
        self._arrays = [array for arrays in values for array in arrays]
        shape = len(values), len(values[0]) if values else 0
        self.fresh = np.zeros(shape, np.int8)
        handles = np.array(addresses_of(self._arrays), np.int64)
        adds = np.array([parameter.grad_req == "add" for parameter in parameters], np.int8)
        self.passes = np.zeros(shape[1], np.int64)
        kept = handles, adds, np.zeros(shape, np.int32), *np.zeros((2, shape[1]), np.int8), self.passes
        record: Any = C.Marks(num_parameters=shape[0], num_copies=shape[1], round=1, has_news=1)
        for name, memory in zip(("handles", "adds", "rounds", "in_round", "in_last", "passes"), kept):
            setattr(record, name, address_of(memory))
        self.record = address_of(record)
        if shape[1] > 1 or is_one_of_several:  # on one device, what is marked is fresh
            _watch(self.record)
        weakref.finalize(self, _forget, record, kept, self._arrays)
        found = weakref.ref(self)  # whoever makes marks keeps them, and so the arrays
        _locations.update((one, _Location(found, location, values_of(one))) for location, one in enumerate(parameters))


def _forget(record: Any, *_kept: Any) -> None:
    """Watch these gradients no longer; what was kept for the record may go afterwards."""
    _unwatch(address_of(record))


def _itself(marks: Marks) -> Marks:
    """A reference that keeps the marks."""
    return marks


def _known(parameter: mx.gluon.Parameter) -> tuple[Marks | None, int]:
    """The marks of a parameter, if there are any, and its number in them."""
    location = _locations.get(parameter)
    return (
        (None, 0)
        if location is None or location.arrays is not values_of(parameter)
        else (location.marks(), location.number)
    )


def _keep(parameters: Sequence[mx.gluon.Parameter]) -> None:
    """Make marks for parameters without a trainer's, which live as long as one of them has no others."""
    found = functools.partial(_itself, Marks(parameters))
    _locations.update((one, _Location(found, number, values_of(one))) for number, one in enumerate(parameters))


def watch(parameters: Iterable[mx.gluon.Parameter]) -> None:
    """Have marks, from the next pass on, for parameters on several devices that no trainer has yet."""
    alike: dict[tuple, list[mx.gluon.Parameter]] = {}
    for parameter in parameters:
        if gradients_of(parameter) is not None and len(gradients_of(parameter)) > 1:
            alike.setdefault(tuple(parameter.list_ctx()), []).append(parameter)
    for group in alike.values():
        _keep(group)


def of_parameter(parameter: mx.gluon.Parameter) -> tuple[Marks, int]:
    """The marks of a parameter with gradients, and its number in them."""
    if _known(parameter)[0] is None:  # no trainer's plan has any
        _keep([parameter])
    marks, number = _known(parameter)
    assert marks is not None
    return marks, number


def flags(parameter: mx.gluon.Parameter) -> list[bool]:
    """Whether the gradient of each copy is fresh."""
    marks, number = of_parameter(parameter)
    found = marks.fresh[number]
    get_marks(marks.record, number, number + 1, address_of(found))
    return list(map(bool, found))


def _unmark_stale(parameter: mx.gluon.Parameter) -> None:
    """Take MXNet's mark away from copies that are not fresh by the marks so far: new ones do not know the rounds."""
    if _known(parameter)[0] is not None:
        for array, is_fresh in zip(values_of(parameter), flags(parameter)):
            if not is_fresh:
                set_fresh(array, False)
