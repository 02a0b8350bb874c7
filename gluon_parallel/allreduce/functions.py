"""`allreduce`, `average_gradients` and `broadcast`: checks of their arguments, and which gradients are summed.

Nothing here waits: every function queues its work in MXNet's engine and returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..errors import ArrayMismatch
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_legacy
from . import gradients
from .copy_sums import CopySums

_ONE_PER_DEVICE = "expected one parameter's copies, one per device: for parameter in parameters: gp."
_GRADIENTS, _VALUES = (
    f"{_ONE_PER_DEVICE}{call}" for call in ("allreduce(parameter.list_grad())", "broadcast(parameter.list_data())")
)
_ONE_TOWER_PER_DEVICE = (
    "expected one list per device: [[parameter.grad(device) for parameter in parameters] for device in devices]"
)


def _check(arrays: Sequence[mx.nd.NDArray], what: str, remedy: str) -> None:
    """ArrayMismatch unless one array per device, alike; with `remedy` also: other devices, of one parameter."""
    if not isinstance(arrays, (list, tuple)):
        raise ArrayMismatch(f"{what}: expected a list of NDArrays, one per device, got {type(arrays).__name__}")
    if not arrays:
        raise ArrayMismatch(f"{what}: got an empty list; expected one NDArray per device")
    for index, array in enumerate(arrays):
        if not isinstance(array, mx.nd.NDArray):
            hints = {tuple: "; pass the gradients alone, without their variables",
                     np.ndarray: "; write mx.nd.array(array, ctx=device)"}  # fmt: skip
            kind = "numpy.ndarray" if isinstance(array, np.ndarray) else type(array).__name__
            raise ArrayMismatch(f"{what}[{index}]: expected an NDArray, got {kind}{hints.get(type(array), '')}")
    first, owners = arrays[0], [gradients.owner_of(array) for array in arrays]
    for index, (array, owner) in enumerate(zip(arrays, owners)):
        for aspect in ("shape", "dtype", "stype"):
            got, wanted = getattr(array, aspect), getattr(first, aspect)
            if got != wanted:
                raise ArrayMismatch(
                    f"{what}[{index}] on {array.ctx} has {aspect} {_name(got)}, but {what}[0] on {first.ctx} "
                    f"has {_name(wanted)}; the same parameter must look alike on every device"
                )
        if any(array is other for other in arrays[:index]):
            raise ArrayMismatch(f"{what}[{index}] is the same array as an earlier one; pass each device's own copy")
        if remedy and array.ctx in (devices := [other.ctx for other in arrays[:index]]):
            where = f"{what}[{devices.index(array.ctx)}]"
            raise ArrayMismatch(f"{what}[{index}] is on {array.ctx}, as {where} is; {remedy}")
        if remedy and owner != owners[0] and owner is not None and owners[0] is not None:
            raise ArrayMismatch(
                f"{what}[{index}] is the {owner[1]} of {owner[0].name}, but {what}[0] the {owners[0][1]} of "
                f"{owners[0][0].name}; {remedy}"
            )
    if remedy and owners[0] is not None and len(arrays) < len(owners[0][0].list_ctx()):
        (parameter, kind), devices = owners[0], [array.ctx for array in arrays]
        used = zip(parameter.list_ctx(), gradients.flags(parameter))
        left_out = [str(one) for one, is_fresh in used if one not in devices and (is_fresh or kind == "value")]
        if left_out:
            raise ArrayMismatch(
                f"{what}: the {kind} of {parameter.name} is given on {', '.join(map(str, devices))}, but not on "
                f"{', '.join(left_out)}; {remedy}"
            )


def _name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


@contextlib.contextmanager
def _noted(lists: Sequence[Sequence[mx.nd.NDArray]], zero: bool = True) -> Iterator[None]:
    """For a block that makes each list's arrays equal: a parameter's gradients are noted as summed.

    With `zero`, gradients that are not fresh become zero before: their devices had no samples.
    """
    parameters = [gradients.owner(arrays) for arrays in lists]
    for parameter, arrays in zip(parameters, lists):
        if parameter is not None and zero:
            gradients.refuse_second_sum(parameter)
            if gradients.clipped:
                gradients.refuse_clipped([parameter], over_processes=False)
            gradients.zero_stale(parameter, arrays)
    yield
    for parameter, arrays in zip(parameters, lists):
        if parameter is not None and len(arrays) == len(parameter.list_ctx()):
            gradients.mark(parameter, False)
            gradients.summed.add(parameter)


def allreduce_each(lists: Iterable[Sequence[mx.nd.NDArray]], priority: int = 0) -> None:
    """:func:`allreduce` of several lists, the most urgent first, which takes less time than one call for each."""
    lists = list(lists)
    for arrays in lists:
        _check(arrays, "arrays", remedy="")
    CopySums(lists).push(priority)


def allreduce(arrays: Sequence[mx.nd.NDArray], priority: int = 0) -> None:
    """Replace every array by the sum of all, in place; every device ends with the same bits.

    It adds up over the devices of this process, needs no keys and does not wait. A KVStore (:func:`gp.kvstore.create`)
    holds arrays under keys and sums over processes as well.

    A batch with fewer samples than devices leaves the gradient of an earlier batch on the idle ones. Given the
    gradients of a Gluon parameter (``parameter.list_grad()``), those count as zero, unless its ``grad_req`` is
    ``"add"``. For arrays with ``attach_grad`` this is not known: set them to zero before (``array.grad[:] = 0``).

    Args:
        arrays: one NDArray per device, alike in shape, dtype and storage type. Dense arrays of any dtype and
            ``row_sparse`` gradients are summed; float16 and bfloat16 are added in float32 and rounded once.
        priority: a higher one is summed earlier when several sums are ready.

    Raises:
        ArrayMismatch: they differ, are of several parameters, two are on one device, or a gradient that a backward pass
            has written on another device is left out; names the first such array. Nothing has been changed then.
        GradientUnavailable: they hold a sum already, to which a backward pass has added since (``grad_req="add"``).

    Example:
        >>> grads = [mx.nd.array([1, 2], ctx=mx.cpu(0)), mx.nd.array([10, 20], ctx=mx.cpu(1))]
        >>> allreduce(grads)
        >>> grads[1].asnumpy().tolist()
        [11.0, 22.0]
    """
    _check(arrays, "arrays", _GRADIENTS)
    with _noted([arrays]):
        allreduce_each([arrays], priority)


def broadcast(arrays: Sequence[mx.nd.NDArray]) -> None:
    """Replace every array by the first one, in place.

    Args:
        arrays: one NDArray per device, alike in shape, dtype and storage type.

    Raises:
        ArrayMismatch: they differ, are of several parameters, two are on one device, or a copy of a parameter is left
            out; nothing has been changed then.

    Example:
        >>> weights = [mx.nd.ones(2, ctx=mx.cpu(0)), mx.nd.zeros(2, ctx=mx.cpu(1))]
        >>> broadcast(weights)
        >>> weights[1].asnumpy().tolist()
        [1.0, 1.0]
    """
    _check(arrays, "arrays", _VALUES)
    with mx.autograd.pause(), _noted([arrays], zero=False):
        for array in arrays[1:]:
            as_legacy(arrays[0]).copyto(as_legacy(array))


def average_gradients(tower_grads: Iterable[Sequence[mx.nd.NDArray]]) -> list[Sequence[mx.nd.NDArray]]:
    """Average each parameter's gradient over the devices that hold a copy of it, in place.

    TensorFlow calls the net on one device a tower. The mean over towers is the gradient of the mean loss of the whole
    batch if every tower had equally many samples; :class:`gluon_parallel.DataParallel` is exact for any sizes.

    Args:
        tower_grads: one list per device, each holding one NDArray per parameter, in the same order and of the same
            shapes on every device.

    Returns:
        The same lists of the same NDArrays, which now hold the averages, all devices equal.

    Raises:
        ArrayMismatch: two devices disagree about the number, shape or dtype of the gradients, or the lists are not
            one per device; nothing has been changed then.
        GradientUnavailable: as for :func:`allreduce`.

    Example:
        >>> grads = average_gradients([[mx.nd.array([1.0])], [mx.nd.array([3.0], ctx=mx.cpu(1))]])
        >>> grads[0][0].asnumpy().tolist()
        [2.0]
    """
    tower_grads = list(tower_grads)
    if not tower_grads:
        raise ArrayMismatch("tower_grads: got an empty list; expected one list of gradients per device")
    for device, grads in enumerate(tower_grads):
        if not isinstance(grads, (list, tuple)):
            raise ArrayMismatch(f"tower_grads[{device}]: expected a list of NDArrays, got {type(grads).__name__}")
        if len(grads) != len(tower_grads[0]):
            raise ArrayMismatch(
                f"tower_grads[{device}] holds {len(grads)} gradients, but tower_grads[0] holds {len(tower_grads[0])}; "
                "every device must list the same parameters in the same order"
            )
        if len({gradient.ctx for gradient in grads if isinstance(gradient, mx.nd.NDArray)}) > 1:
            raise ArrayMismatch(f"tower_grads[{device}] holds gradients on several devices; {_ONE_TOWER_PER_DEVICE}")
    parameters = [list(copies) for copies in zip(*tower_grads)]
    for index, copies in enumerate(parameters):
        _check(copies, f"gradients of parameter {index}", _ONE_TOWER_PER_DEVICE)
        if copies[0].stype == "default" and np.dtype(copies[0].dtype).kind not in "fV":
            raise ArrayMismatch(
                f"gradients of parameter {index} are {_name(copies[0].dtype)}, which has no exact mean; use allreduce"
            )
    if parameters:
        with _noted(parameters):
            CopySums(parameters, 1 / len(tower_grads)).push()
    return tower_grads
