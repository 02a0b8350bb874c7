"""The two forms of a loss, values per sample and sums with counts: their form, gradient and mean."""

from .. import sample_loss
from ..compat import mx
from ..compat.array_types import as_current, as_legacy
from ..device_threads import parallel_apply
from ..errors import BatchMismatch
from ..kvstore.reserved_keys import LOSS_PARTS
from ..nn import join
from .background_sum import BackgroundSum

nd = mx.nd


class LossPerSample:
    """One value per sample, or one per device, their mean or sum; the gradient is that of the samples' sum.

    Args:
        reduction: ``"mean"`` or ``"sum"`` if the loss returns one value per device; None for one value per sample.
    """

    is_divided = False  # the sum of all gradients is to be divided by the number of samples
    needs_all = False  # the heads of a backward pass follow from the forward passes of all shards
    parts: dict = {}

    def __init__(self, reduction):
        self._reduction = reduction

    def backward(self, run, shards, sizes, scale):
        """Run all forward passes, then all backward passes, as :func:`.sample_loss.backward` does.

        Returns:
            The mean loss of this process, of shape (1,), on the first device.
        """
        return sample_loss.backward(run, shards, sizes, self._reduction, scale)

    def checked(self, loss, size):
        """What the loss function returned for `size` samples, as a tuple of arrays; refuses another form."""
        sample_loss.weight_of(loss, size, self._reduction)
        return (loss,)

    def heads(self, rows, sizes, scale):
        """The head gradients for the arrays of each row, which :meth:`checked` has returned, multiplied by `scale`."""
        return [
            (sample_loss.head(loss, sample_loss.weight_of(loss, size, self._reduction) * scale),)
            for (loss,), size in zip(rows, sizes)
        ]

    def mean(self, rows, sizes):
        """What :meth:`backward` returns."""
        losses = [loss for (loss,) in rows]
        weights = [sample_loss.weight_of(loss, size, self._reduction) for loss, size in zip(losses, sizes)]
        return sample_loss.mean(losses, weights, sum(sizes))

    def without_samples(self, net, device):
        """Take part in the others' forward and backward passes; returns what :meth:`backward` does."""
        join(net)
        return as_current(nd.zeros(1, ctx=device))


class LossOfParts:
    """A sum and a count for each part; each part is its sum divided by its count, over all devices and processes.

    The division is in the heads of the backward pass, which the engine knows as soon as all forward passes are through
    and the processes' counts are added up.
    """

    is_divided = needs_all = True

    def __init__(self, names, store):
        self._names = tuple(names)
        self._sum = BackgroundSum(store, LOSS_PARTS, 2 * len(self._names))
        self.parts = {}

    def backward(self, run, shards, sizes, scale):
        """As of :class:`LossPerSample`, but the loss is that of all processes."""
        rows = parallel_apply(sample_loss.recorded(lambda *shard: self.checked(run(*shard), None)), shards)
        heads = self.heads(rows, sizes, scale)
        parallel_apply(mx.autograd.backward, [(list(row[: len(head)]), list(head)) for row, head in zip(rows, heads)])
        return self.mean(rows, sizes)

    def heads(self, rows, sizes, scale):
        """As of :class:`LossPerSample`, for the sums of each row; adds up the sums and counts of all."""
        values = [[value.detach().astype("float64") for value in row] for row in rows]
        counts = self._together([nd.concat(*row, dim=0) for row in values])
        found = []
        for row in rows:
            shares = (scale / counts).as_in_context(row[0].context).split(len(self._names), 0)
            found.append(tuple(share.astype(value.dtype) for value, share in zip(row, shares)))
        return found

    def mean(self, rows, sizes):
        """As of :class:`LossPerSample`, after :meth:`heads`."""
        return as_current(sum(self.parts.values()))

    def without_samples(self, net, device):
        """As of :class:`LossPerSample`; adds nothing to the others' sums and counts."""
        join(net, lambda: self._together([nd.zeros(2 * len(self._names), ctx=device, dtype="float64")]))
        return as_current(sum(self.parts.values()))

    def checked(self, pairs, size):
        """The sums, and after them the counts, of one shard's parts, each of shape (1,)."""
        pairs = list(pairs)
        right = all(isinstance(pair, (list, tuple)) and [array.size for array in pair] == [1, 1] for pair in pairs)
        if len(pairs) != len(self._names) or not right:
            raise BatchMismatch(
                f"the loss has the parts {', '.join(self._names)}, so it returns {len(self._names)} pairs (sum, count) "
                f"of arrays of one value; got {len(pairs)} of another form"
            )
        return tuple(as_legacy(array).reshape((1,)) for arrays in zip(*pairs) for array in arrays)

    def _together(self, own):
        """Add up sums and counts over the devices, (2 * parts,) each, and the processes; returns the counts.

        All of them are at least 1: of nothing at all the sum is 0, and so is its mean.
        """
        device = own[0].context
        own = [values.as_in_context(device) for values in own]
        total = self._sum.sum(sum(own[1:], own[0])).as_in_context(device).astype("float32")
        num = len(self._names)
        sums, counts = total[:num], nd.maximum(total[num:], 1)
        self.parts = {name: (sums / counts)[part : part + 1] for part, name in enumerate(self._names)}
        return counts
