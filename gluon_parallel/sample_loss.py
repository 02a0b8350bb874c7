"""Gradient of a loss over the samples of several shards, whose values are per sample, a mean or a sum."""

import numpy as np

from .compat import mx
from .compat.array_types import BFLOAT16, as_current, as_legacy
from .device_threads import parallel_apply
from .errors import BatchMismatch

nd = mx.nd


def check_reduction(reduction):
    """Refuse a word that is no reduction."""
    if reduction not in (None, "mean", "sum"):
        raise ValueError(
            f"reduction: expected 'mean' or 'sum' for a loss that returns a single value per device, or None for one "
            f"value per sample; got {reduction!r}"
        )


def backward(run, shards, sizes, reduction=None, scale=1.0):
    """Run the forward passes of all shards, then their backward passes; the gradient is that of the samples' sum.

    Args:
        run: a function of a shard's arguments that returns its loss: one value per sample (first axis; further axes
            are summed), or, with `reduction`, a single value.
        shards: one per device, see :func:`parallel_apply`.
        sizes: how many samples each has.
        reduction: ``"mean"`` or ``"sum"``, what a single value is; None for one value per sample.
        scale: what the gradients, and they alone, are multiplied by.

    Returns:
        The mean loss over all samples, of shape (1,), on the first shard's device; not waited for.

    Raises:
        BatchMismatch: the loss has another form. Nothing has gone backward then.
    """
    losses = parallel_apply(recorded(run), shards)
    weights = [weight_of(loss, size, reduction) for loss, size in zip(losses, sizes)]
    heads = [head(loss, weight * scale) for loss, weight in zip(losses, weights)]
    parallel_apply(mx.autograd.backward, list(zip(losses, heads)))
    return mean(losses, weights, sum(sizes))


def head(loss, weight):
    """The head gradient of a backward pass in which each element of the loss counts `weight`."""
    return nd.full(loss.shape, weight, loss.ctx, loss.dtype)


def mean(losses, weights, num):
    """The mean of losses with these weights over `num` samples, of shape (1,), on the first one's device."""
    sums = [_wide(loss).sum().as_in_context(losses[0].ctx) for loss in losses]
    sums = [one if weight == weights[0] else one * (weight / weights[0]) for one, weight in zip(sums, weights)]
    return as_current((nd.add_n(*sums) * (weights[0] / num)).reshape((1,)))


def recorded(function):
    """`function`, recorded for a backward pass."""

    def run(*arguments):
        with mx.autograd.record():
            return function(*arguments)

    return run


def _wide(loss):
    """The loss as an mx.nd array, in float32 where half precision could not hold the sum of a batch."""
    legacy = as_legacy(loss)
    return legacy.astype("float32") if legacy.dtype in (np.float16, BFLOAT16) else legacy


def weight_of(loss, size, reduction):
    """What one element of a shard's loss counts: 1 in a sum over the samples, all samples if it is their mean."""
    if not isinstance(loss, nd.NDArray):
        raise BatchMismatch(f"the loss returned a {type(loss).__name__}; expected one NDArray")
    where = f"the loss has shape {loss.shape} for {size} samples on {loss.ctx}"
    if reduction is not None:
        if loss.size != 1:
            raise BatchMismatch(
                f"{where}; expected a single value, because reduction={reduction!r}. A loss that returns one value per "
                "sample (first axis), as Gluon's do, needs no reduction: leave it out"
            )
        return size if reduction == "mean" else 1
    if loss.ndim and loss.shape[0] == size:
        return 1
    if loss.size == 1:
        raise BatchMismatch(
            f"{where}, and a single value may be the mean over the samples or their sum: pass "
            'reduction="mean" or reduction="sum" beside the loss, or return one value per sample (first axis)'
        )
    raise BatchMismatch(
        f"{where}; expected one value per sample (first axis), or a single value with "
        'reduction="mean" or reduction="sum" beside the loss'
    )
