"""Gradient of a loss over the samples of several shards, whose values are per sample, a mean or a sum."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import numpy as np

from .errors import BatchMismatch
from .mxnet.compat import mx
from .mxnet.compat.array_types import BFLOAT16, Nested, as_current, as_legacy
from .mxnet.device_threads.thread import apply_on, joint_pass

nd = mx.nd


def check_reduction(reduction: str | None) -> None:
    """Refuse, by a ValueError, what is no `reduction` of :func:`backward_per_sample`."""
    if reduction not in (None, "mean", "sum"):
        raise ValueError(
            "reduction: expected 'mean' or 'sum' for a loss that returns a single value per device, or None for "
            f"one value per sample; got {reduction!r}"
        )


def backward_per_sample(
    run: Callable[..., Any],
    shards: Sequence[Nested],
    sizes: Sequence[int],
    devices: Sequence[mx.Context],
    scale: float = 1.0,
    reduction: str | None = None,
) -> mx.nd.NDArray:
    """Run forward and backward passes, one shard after the other; the gradient is that of the sum over the samples.

    Args:
        run: a function of a shard's arguments, nested in a tuple, that returns its loss.
        shards: one per device, see :func:`parallel_apply`.
        sizes: how many samples each has.
        devices: the device of each.
        scale: what the gradients, and they alone, are multiplied by.
        reduction: ``"mean"`` or ``"sum"`` if the loss returns a single value per shard; None for one value per sample
            (first axis; further axes are summed).

    Returns:
        The mean loss over all samples, of shape (1,), on the first shard's device; not waited for.

    Raises:
        BatchMismatch: the loss has another form.
    """

    def forward_and_backward(shard: Nested, size: int) -> tuple[mx.nd.NDArray, int]:
        with mx.autograd.record():
            loss = run(*shard)
        weight = weight_of(loss, size, reduction)
        is_one = weight * scale == 1  # which is MXNet's own head gradient
        mx.autograd.backward([loss], None if is_one else [head_of(loss.shape, loss.ctx, loss.dtype, weight * scale)])
        return loss, weight

    with joint_pass():
        losses, weights = zip(*apply_on(forward_and_backward, list(zip(devices, zip(shards, sizes)))))
    return mean_of(losses, weights, sizes)


def weight_of(loss: Any, size: int, reduction: str | None) -> int:
    """What one element of the loss of `size` samples counts: 1 in a sum over them, all samples if it is their mean.

    BatchMismatch: the loss has a form that does not go with the reduction.
    """
    if not isinstance(loss, nd.NDArray):
        raise BatchMismatch(f"the loss returned a {type(loss).__name__}; expected one NDArray")
    if reduction is None and loss.shape[:1] == (size,):
        return 1
    if reduction is not None and loss.size == 1:
        return size if reduction == "mean" else 1
    where = f"the loss has shape {loss.shape} for {size} samples on {loss.ctx}"
    if reduction is not None:
        raise BatchMismatch(
            f"{where}; expected a single value, because reduction={reduction!r}. For one value per "
            "sample (first axis), as of Gluon's losses, leave it out"
        )
    raise BatchMismatch(
        f"{where}; expected one value per sample (first axis), or a single value, their mean or sum: pass "
        'reduction="mean" or reduction="sum" beside the loss. One that divides by a number of its own, such as '
        "positives, is neither: return pairs (sum, count), see `parts` of gp.DataParallel. One that compares samples "
        'of the batch with each other needs all of them: pass loss_over="batch"'
    )


@functools.lru_cache(maxsize=64)
def head_of(shape: tuple[int, ...], device: mx.Context, dtype: Any, value: float) -> mx.nd.NDArray:
    """The head gradient of a loss, an array of one value, which is only read; the steps of a training need few."""
    return nd.full(shape, value, device, dtype)


def mean_of(losses: Sequence[mx.nd.NDArray], weights: Sequence[int], sizes: Sequence[int]) -> mx.nd.NDArray:
    """The mean over all samples, (1,), on the first device; an element of a loss counts for `weights` of them."""
    # As mx.nd arrays, in float32 where half precision could not hold the sum of a batch.
    wide = [one.astype("float32") if one.dtype in (np.float16, BFLOAT16) else one for one in map(as_legacy, losses)]
    if len(losses) == 1 and weights[0] == 1 and losses[0].shape == (sizes[0],):
        return as_current(wide[0].mean())
    sums = [loss.sum().as_in_context(losses[0].ctx) for loss in wide]
    sums = [one if weight == weights[0] else one * (weight / weights[0]) for one, weight in zip(sums, weights)]
    return as_current(nd.add_n(*sums) * (weights[0] / sum(sizes)))
