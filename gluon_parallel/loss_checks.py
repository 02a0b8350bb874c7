"""Checks of a loss function in the first step: its gradient follows the one from above, and its value is per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from .errors import BatchMismatch
from .mxnet.compat import mx
from .mxnet.compat.array_types import Nested, as_class_of, as_legacy, leaves
from .split import map_arrays

nd = mx.nd

# What a loss raises that cannot be called in another mode, or with two samples for one.
_FAILS = (mx.base.MXNetError, TypeError, AssertionError, ValueError, IndexError, AttributeError)


def check_loss(
    loss: Callable[..., Any],
    outputs: tuple,
    labels: tuple,
    size: int,
    reduction: str | None = None,
    num_parts: int = 0,
    has_scale: bool = False,
    axis: int = 0,
) -> None:
    """Refuse a loss that several devices, or batches that are added up, cannot train with; calls it again and waits.

    It calls the loss in predict mode, for it may have layers, or call another net, whose running statistics would move
    once more, whose devices would wait for each other, or that drop values.

    Gradients are weighted by the gradient that the loss gets from above (its head). Operators such as SoftmaxOutput
    ignore that. It is right only if they return the sum over the samples all the same.

    Args:
        loss: called as ``loss(*outputs, *labels)``.
        outputs, labels: of one shard of `size` samples, on one device; its net is not run again.
        reduction: ``"mean"``, ``"sum"``, or None for one value per sample.
        num_parts: how many pairs (sum, count) it returns; 0: none.
        has_scale: whether gradients are scaled, as for float16.
        axis: the axis of outputs and labels that counts samples.

    Raises:
        BatchMismatch: its gradient divides by the samples, or valid labels, of its shard; or it returns one value for
            one sample and for two.
    """
    if type(loss).__module__ == "mxnet.gluon.loss":
        return  # Gluon's own: one value per sample, and no operator that ignores its head
    try:
        whole, half = _gradients(loss, outputs, labels, (1.0, 0.5), num_parts)
        follows = not _differ(whole, [2 * array for array in half])
    except _FAILS:
        follows = True  # as far as can be told
    if not follows and (num_parts or reduction or has_scale or not _is_sum(loss, outputs, labels, size, axis, whole)):
        raise BatchMismatch(
            f"the gradient of {_name(loss)} does not follow from the gradient that it gets: half of its value has "
            "another gradient than half of the value's gradient. Operators such as SoftmaxOutput and MakeLoss ignore "
            f"it, and with normalization='valid' or 'batch' divide by the {size} sample{'s' * (size > 1)} of one "
            "device, so that the weights depend on the number of devices, and loss scaling has no effect. Write a loss "
            "of plain operators, such as gluon.loss.SoftmaxCrossEntropyLoss(axis=1); of GluonCV's losses, "
            "size_average=False makes the gradient a sum over the pixels (divide the learning rate by their number "
            "per image). For a mean over pixels or boxes, return pairs (sum, count), see `parts` of gp.DataParallel; "
            "gp.models.PixelLoss does"
        )
    if size == 1 and reduction is None and not num_parts:
        _refuse_single_value(loss, outputs, labels, axis)


def _refuse_single_value(loss: Callable[..., Any], outputs: tuple, labels: tuple, axis: int) -> None:
    """Refuse a loss that returns one value for two samples as it did for one: that may be their mean or sum."""
    try:
        with mx.autograd.pause():
            value = loss(*_twice(outputs, axis), *_twice(labels, axis))
        shape = value.shape
    except _FAILS:  # it is made for one sample, so no other number of samples can come
        return
    if len(shape) and shape[0] == 2:
        return
    raise BatchMismatch(
        f"the loss has shape {shape} for two samples as for the one sample of this device; expected one value per "
        'sample (first axis), or a single value, their mean or sum: pass reduction="mean" or reduction="sum" beside '
        "the loss. One that divides by a number of its own, such as positives, is neither: return pairs (sum, count), "
        "see `parts` of gp.DataParallel"
    )


def _gradients(
    loss: Callable[..., Any], outputs: tuple, labels: tuple, heads: Sequence[float], num_parts: int = 0
) -> list[list[mx.nd.NDArray]]:
    """For each head, the gradients of the outputs; gradients of parameters stay as they are."""
    marked = map_arrays(lambda array: array.detach(), outputs)
    variables = [array for _, array in leaves(marked) if _has_gradient(array)]
    for array in variables:
        array.attach_grad()
    with mx.autograd.record(train_mode=False):
        returned = loss(*marked, *labels)
        values = [pair[0] for pair in returned] if num_parts else [returned]
        ties = [array * 1 for array in variables]  # MXNet refuses variables that a loss does not depend on
    zeros = [nd.zeros(one.shape, one.ctx, one.dtype) for one in ties]
    found = []
    for head in heads:
        given = [nd.full(one.shape, head, one.ctx, one.dtype) for one in values] + zeros
        given = [as_class_of(array, one) for array, one in zip(given, (*values, *ties))]
        found.append(mx.autograd.grad([*values, *ties], variables, given, retain_graph=True, train_mode=False))
    return [[as_legacy(array).astype("float32") for array in gradients] for gradients in found]


def _is_sum(
    loss: Callable[..., Any], outputs: tuple, labels: tuple, size: int, axis: int, whole: Sequence[mx.nd.NDArray]
) -> bool:
    """Whether the gradient of a sample stays the same beside another one; asked of the sample that has most of it."""
    first = whole[0]
    if first.ndim <= axis or first.shape[axis] != size:
        return False
    others = tuple(number for number in range(first.ndim) if number != axis)
    chosen = int(first.abs().sum(axis=others).asnumpy().argmax())

    def cut(data: Nested) -> Nested:
        counts = _is_per_sample(axis, size)
        return map_arrays(lambda array: _slice(array, axis, chosen, chosen + 1) if counts(array) else array, data)

    outputs, labels = cut(outputs), cut(labels)
    try:
        [alone] = _gradients(loss, outputs, labels, (1.0,))
        [twice] = _gradients(loss, _twice(outputs, axis), _twice(labels, axis), (1.0,))
        return not _differ(alone, [nd.slice_axis(array, axis, 0, 1) for array in twice])
    except _FAILS:
        return False


def _differ(first: Sequence[mx.nd.NDArray], second: Sequence[mx.nd.NDArray]) -> bool:
    """Whether gradients differ by more than 1 % of the largest value, as no rounding of half precision makes them."""
    most = max((array.abs().max().asscalar() for array in first), default=0.0)
    return any((one - other).abs().max().asscalar() > 0.01 * most for one, other in zip(first, second))


def _twice(data: tuple, axis: int) -> tuple:
    """A sample and itself once more, in every array that counts samples."""
    counts = _is_per_sample(axis, 1)
    return map_arrays(lambda one: _concatenated(one, axis) if counts(one) else one, data)


def _concatenated(array: mx.nd.NDArray, axis: int) -> mx.nd.NDArray:
    return as_class_of(nd.concat(*[as_legacy(array)] * 2, dim=axis), array)


def _slice(array: mx.nd.NDArray, axis: int, begin: int, end: int) -> mx.nd.NDArray:
    return as_class_of(nd.slice_axis(as_legacy(array), axis, begin, end), array)


def _is_per_sample(axis: int, size: int) -> Callable[[mx.nd.NDArray], bool]:
    return lambda array: array.ndim > axis and array.shape[axis] == size


def _has_gradient(array: Any) -> bool:
    return isinstance(array, nd.NDArray) and array.size > 0 and np.dtype(array.dtype).kind in "fV"


def _name(loss: Any) -> str:
    return getattr(loss, "__qualname__", type(loss).__name__)
