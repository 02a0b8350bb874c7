"""`gather`: the whole batch's arrays, made of those that devices and processes have, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import BatchMismatch
from .kvstore import as_store
from .kvstore.collective import collective
from .kvstore.contract import contract, is_distributed
from .kvstore.process_rows import ProcessRows, RowForm, RowsOfAll, rows_over
from .mxnet.compat import mx
from .mxnet.compat.array_types import BFLOAT16, Nested, as_class_of, as_legacy, leaves, to_device
from .split import map_aligned, map_arrays, map_items, num_samples

nd = mx.nd


class _ArrayNumber(int):
    """The number of an array, in its place in a nesting."""


def gather(outputs: Sequence[Nested], store: Any = None, batch_axis: int = 0) -> Nested:
    """Put together what the devices, and the processes, have of a batch: the whole batch's arrays, on one device.

    For a loss that looks at other samples of the batch, in a loop of your own. Under ``autograd.record()`` it is
    differentiable: ``loss.backward()`` gives each device the gradient of its own rows. Every process computes the same
    loss, and has the gradient of its own samples, so that the sum over processes, which ``trainer.step`` makes, is
    the gradient of the loss of the whole batch: ``trainer.step(1)`` for a loss that is a mean, or a single value.

    A parameter that the loss itself uses, such as a temperature, has its whole gradient on every process, and would
    count once for each: use ``parameter.data().detach()`` on all processes but that with ``store.rank == 0``.
    ``DataParallel(..., loss_over="batch")`` sees to that by itself.

    Args:
        outputs: of each device that has samples, what the net returned for its shard, in the order of
            :func:`split_and_load`: an array, or a (nested) tuple, list or dict of arrays. Labels are gathered in the
            same way. Each array has one row per sample.
        store: a KVStore that sums, made with ``gp.kvstore.create``: that of the trainer. All processes call it equally
            often, each with at least one sample. None: the devices of this process alone.
        batch_axis: the axis of the arrays that counts samples.

    Returns:
        Nested like one of `outputs`, on the device of the first: the rows of process 0 first, of each process those of
        its first device first. That is the order of the batch that :func:`split_and_load` and ``gp.prepare`` divide.
        What is bfloat16 becomes float32.

    Raises:
        BatchMismatch: there is no output, devices have nested them differently, or an array does not have one row per
            sample.
        WorkersDiffer: another process has arrays of another shape (but for the number of rows) or dtype.
        BarrierTimeout, WorkerLost: another process has not called it in time.
        TypeError: `store` is no KVStore.
        ValueError: the store's processes do not wait for each other.

    Example:
        >>> shards = [mx.nd.array([[1], [2]], mx.cpu(0)), mx.nd.array([[3]], mx.cpu(1))]
        >>> for shard in shards:
        ...     shard.attach_grad()
        >>> with mx.autograd.record():
        ...     batch = gather(shards)
        ...     loss = nd.dot(batch, batch, transpose_b=True).sum()  # of all pairs
        >>> loss.backward()
        >>> batch.shape, shards[1].grad.asnumpy().tolist()
        ((3, 1), [[12.0]])
    """
    shards = [outputs] if isinstance(outputs, mx.nd.NDArray) else list(outputs)
    if not shards or not flat(shards[0]):
        raise BatchMismatch("gp.gather: there are no outputs; expected those of one device at least")
    for number, shard in enumerate(shards):
        refuse_without_rows(shard, f"gp.gather, outputs[{number}]", batch_axis)
    own = join_devices(shards, batch_axis)
    if store is None or not is_distributed(as_store(store, "gp.gather")):
        return own
    if contract(store).is_asynchronous:
        raise ValueError(
            f"gp.gather: the processes of the store {store.type!r} do not wait for each other, so there is no batch of "
            "all; take another store"
        )
    with collective("gp.gather()"):
        everyones = gather_processes(own, num_samples(own, batch_axis), rows_over(store), batch_axis)
    assert everyones is not None  # this process has samples
    return with_others(own, everyones, flat(own)[0].ctx, batch_axis)


def refuse_without_rows(outputs: Nested, where: str, axis: int, num: int | None = None) -> None:
    """Refuse what is not made of arrays that have one row per sample, of `num` samples if that is known."""
    found = list(leaves(outputs, where))
    for name, array in found:
        if not isinstance(array, mx.nd.NDArray) or array.stype != "default":
            kind = f"a {array.stype} array" if isinstance(array, mx.nd.NDArray) else f"a {type(array).__name__}"
            raise BatchMismatch(f"{name} is {kind}; expected an NDArray with one row per sample (axis {axis})")
    num = next((array.shape[axis] for _, array in found if array.ndim > axis), 0) if num is None else num
    for name, array in found:
        if array.ndim <= axis or array.shape[axis] != num:
            raise BatchMismatch(
                f"{name} has shape {array.shape} for {num} sample{'s' * (num != 1)}; expected one row per sample along "
                f"axis {axis}. What belongs to no sample, such as a temperature, is no output of the net: make it a "
                "parameter of the loss, a gluon.loss.Loss with a parameter, which the trainer has too"
            )


def join_devices(shards: Sequence[Nested], axis: int) -> Nested:
    """The rows of all shards on the device of the first one, nested like it; differentiable."""
    device = flat(shards[0])[0].ctx
    nestings = [[where for where, _ in leaves(shard, "")] for shard in shards]
    if any(nesting != nestings[0] for nesting in nestings):
        raise BatchMismatch("the outputs of the devices are nested differently; expected the same on each")

    def join(arrays: list[mx.nd.NDArray]) -> mx.nd.NDArray:
        on_one = [as_legacy(to_device(array, device)) for array in arrays]
        if on_one[0].dtype == BFLOAT16:  # in which MXNet can put nothing together
            on_one = [nd.amp_cast(array, dtype="float32") for array in on_one]
        of_rows = [(*array.shape[:axis], *array.shape[axis + 1 :]) for array in on_one]
        if len(set(of_rows)) > 1:
            found = ", ".join(f"{array.shape} on {array.ctx}" for array in arrays)
            raise BatchMismatch(
                f"outputs of the devices have the shapes {found}, which do not fit together along axis {axis}; pad "
                "them to one shape"
            )
        whole = _concatenated(list(map(_as_numbers, on_one)), axis)
        return as_class_of(whole.astype(arrays[0].dtype) if whole.dtype != on_one[0].dtype else whole, arrays[0])

    return map_aligned(join, shards)


def _concatenated(arrays: Sequence[mx.nd.NDArray], axis: int) -> mx.nd.NDArray:
    """Arrays of one dtype, ``mx.nd`` ones, along an axis."""
    if len(arrays) == 1:
        return arrays[0]
    return nd.concat(*arrays, dim=axis)


def _as_numbers(array: mx.nd.NDArray) -> mx.nd.NDArray:
    """An array that MXNet cuts and concatenates: of whole numbers where it has truth values."""
    return array.astype("uint8") if np.dtype(array.dtype) == np.bool_ else array


def gather_processes(own: Nested, num: int, rows: ProcessRows, axis: int) -> RowsOfAll | None:
    """The rows of all processes of arrays of which this process has `num`; all call it.

    See :meth:`.ProcessRows.gather`. The nesting of the result is that of `own`, for :func:`with_others`.
    """
    if not num:
        return rows.gather(0, None, ())
    with mx.autograd.pause():
        arrays = [as_legacy(array).detach() for array in flat(own)]
        arrays = [array.swapaxes(0, axis) for array in arrays] if axis else arrays
    count = iter(range(len(arrays)))
    current = [isinstance(array, mx.np.ndarray) for array in flat(own)]
    nesting = map_arrays(lambda _: _ArrayNumber(next(count)), own), current
    form = RowForm([array.shape[1:] for array in arrays], [np.dtype(array.dtype).name for array in arrays], nesting)
    return rows.gather(num, form, arrays)


def flat(data: Nested) -> list[mx.nd.NDArray]:
    """The arrays of nested data, in their order."""
    return [array for _, array in leaves(data)]


def with_others(own: Nested | None, everyones: RowsOfAll, device: mx.Context, axis: int) -> Nested:
    """The rows of all processes on `device`, in which those of `own` are differentiable; None: it has none."""
    nesting, are_current = everyones.nesting
    arrays: list[Any] = []
    mine = [None] * len(are_current) if own is None else flat(own)
    for rows, one, is_current in zip(everyones.arrays, mine, are_current):
        dtype = np.dtype(rows.dtype)
        with mx.autograd.pause():
            rows = _as_numbers(rows.as_in_context(device))
            rows = rows.swapaxes(0, axis) if axis else rows
            begin, total = everyones.begin, rows.shape[axis]
            end = begin if one is None else begin + one.shape[axis]
            before, after = (
                [nd.slice_axis(rows, axis=axis, begin=first, end=last)] if first < last else []
                for first, last in ((0, begin), (end, total))
            )
        whole = rows if one is None else _concatenated([*before, _as_numbers(as_legacy(one)), *after], axis)
        whole = whole.astype(dtype) if dtype == np.bool_ else whole
        arrays.append(whole.as_np_ndarray() if is_current else whole)
    return _nested(nesting, arrays)


def _nested(nesting: Any, arrays: Sequence[Any]) -> Nested:
    return (
        arrays[nesting] if isinstance(nesting, _ArrayNumber) else map_items(lambda part: _nested(part, arrays), nesting)
    )
