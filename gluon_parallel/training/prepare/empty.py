"""Empty part of a batch: what a process without a sample of it gets, in the classes that the others get."""

from __future__ import annotations

from types import FunctionType
from typing import Any, Callable

import numpy as np

from ...errors import BatchMismatch
from ...mxnet.compat import mx
from ...mxnet.compat.array_types import leaves
from ...split import map_arrays


class EmptyArray(mx.nd.NDArray):
    """An ``mx.nd.NDArray`` of no samples, for what a script does with a batch before the step.

    MXNet takes a size of 0 as unknown, unless ``np_shape`` says that it is one, and few operators compute with it. So
    the methods and operators of this class return what they return for one sample, without it. Functions of ``mx.nd``
    do not.
    """

    __slots__: list[str] = []

    @staticmethod
    def of(shape: tuple[int, ...], context: mx.Context, dtype: Any) -> EmptyArray:
        """An array of that shape, in which a size is 0."""
        with mx.util.np_shape(True):
            array = mx.nd.empty(shape, context, dtype)
        array.__class__ = EmptyArray
        return array


def _without_computing(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is called with arrays of one sample, and of two: which sizes of its result count samples."""

    def call(*arguments: Any, **options: Any) -> Any:
        def result(num: int) -> list[Any]:
            args, named = map_arrays(lambda array: _with_samples(array, num), (list(arguments), options))
            found = method(*args, **named)
            return found if isinstance(found, list) else [found]

        pairs = list(zip(result(1), result(2)))
        if not all(type(one) is mx.nd.NDArray and one.shape != two.shape for one, two in pairs):
            return _under_np_shape(method)(*arguments, **options)  # of a sum, say
        shapes = [tuple(2 * size - other for size, other in zip(one.shape, two.shape)) for one, two in pairs]
        empty = [EmptyArray.of(shape, one.context, one.dtype) for shape, (one, _) in zip(shapes, pairs)]
        return empty if len(empty) > 1 else empty[0]

    return call


def _with_samples(array: Any, num: int) -> Any:
    """An array of ones in the place of one of no samples."""
    is_empty = isinstance(array, EmptyArray)
    return mx.nd.ones([size or num for size in array.shape], array.context, array.dtype) if is_empty else array


def _under_np_shape(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        with mx.util.np_shape(True):
            result = method(*arguments, **options)
        if type(result) is mx.nd.NDArray and result.size == 0:
            result.__class__ = EmptyArray
        return result

    return call


_OPERATORS = ("neg", "abs", "eq", "ne", "gt", "ge", "lt", "le", *(
    kind + name for kind in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "mod", "pow")
))  # fmt: skip
_READING = ("asnumpy", "asscalar", "wait_to_read", "attach_grad", "backward")  # which MXNet does with these, too
for _name, _method in vars(mx.nd.NDArray).items():
    if _name == "__getitem__":
        setattr(EmptyArray, _name, _under_np_shape(_method))
    elif isinstance(_method, FunctionType) and _name not in _READING:
        if not _name.startswith("_") or _name.strip("_") in _OPERATORS:
            setattr(EmptyArray, _name, _without_computing(_method))


def without_samples(batch: Any, batch_axis: int, where: str = "batch") -> Any:
    """A batch of one sample without it: arrays of no samples, and empty lists in the place of lists of samples.

    BatchMismatch: an array has not one sample, so nobody knows what an empty part of it is.
    """
    if isinstance(batch, (mx.nd.NDArray, np.ndarray)):
        return _without_sample(batch, batch_axis, where)
    if isinstance(batch, dict):
        return {key: without_samples(part, batch_axis, f"{where}[{key!r}]") for key, part in batch.items()}
    if not isinstance(batch, (list, tuple)):
        return batch
    is_field = where != "batch"  # a list within the batch has one member per sample, as gluoncv's Append makes them
    if is_field and type(batch) is list and len(batch) == 1 and not _is_list_of_arrays(batch[0]):
        return []
    parts = [without_samples(part, batch_axis, f"{where}[{place}]") for place, part in enumerate(batch)]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def _is_list_of_arrays(data: Any) -> bool:
    """Whether it is what Gluon's batchify makes of a tuple within a sample: a list of arrays of all samples."""
    return type(data) is list and any(isinstance(leaf, (mx.nd.NDArray, np.ndarray)) for _, leaf in leaves(data))


def _without_sample(array: Any, batch_axis: int, where: str) -> Any:
    shape = array.shape
    if shape[batch_axis : batch_axis + 1] != (1,):
        raise BatchMismatch(
            f"a batch has fewer samples than there are processes, and of its part without samples, read with one, "
            f"{where} has the shape {shape}: no axis {batch_axis} of size 1, so it cannot be made empty. If another "
            "axis counts samples, write batch_axis=...; otherwise leave this array out of the batch (make it in the "
            "loop), or that batch: DataLoader(..., last_batch='discard')"
        )
    if isinstance(array, np.ndarray) or isinstance(array, mx.np.ndarray):
        return array[(slice(None),) * batch_axis + (slice(0),)]
    return EmptyArray.of((*shape[:batch_axis], 0, *shape[batch_axis + 1 :]), array.context, array.dtype)
