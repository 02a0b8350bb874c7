"""A loss of parts, each a sum and a count: its form, gradient and mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import BatchMismatch
from ..kvstore.contract import contract
from ..kvstore.reserved_keys import LOSS_PARTS
from ..kvstore.work import NumberSum
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_current, as_legacy
from ..sample_loss import LossPerSample

nd = mx.nd


class LossOfParts(LossPerSample):
    """A sum and a count for each part; each part is its sum divided by its count, over all devices and processes.

    The heads of the backward pass hold the division. The mean loss is that of all processes.
    """

    is_divided = needs_all = True

    def __init__(self, names: Iterable[str], store: mx.kv.KVStoreBase | None) -> None:
        super().__init__()
        self._names = tuple(names)
        self._sum = NumberSum(contract(store), LOSS_PARTS, 2 * len(self._names))
        self.parts = {}

    def heads(
        self, rows: Sequence[Sequence[mx.nd.NDArray]], sizes: Sequence[int], scale: float
    ) -> list[tuple[mx.nd.NDArray, ...]]:
        """As of :class:`.LossPerSample`, for the sums of each row; adds up the sums and counts of all."""
        values = [[value.detach().astype("float64") for value in row] for row in rows]
        counts = self._together([nd.concat(*row, dim=0) for row in values])
        found = []
        for row in rows:
            shares = (scale / counts).as_in_context(row[0].context).split(len(self._names), 0)
            found.append(tuple(share.astype(value.dtype) for value, share in zip(row, shares)))
        return found

    def mean(self, rows: Sequence[Sequence[mx.nd.NDArray]], sizes: Sequence[int]) -> mx.nd.NDArray:
        """As of :class:`.LossPerSample`, after :meth:`heads`."""
        return as_current(sum(self.parts.values()))

    def add_nothing(self, device: mx.Context) -> None:
        """As of :class:`.LossPerSample`."""
        self._together([nd.zeros(2 * len(self._names), ctx=device, dtype="float64")])

    def checked(self, pairs: Iterable[Sequence[mx.nd.NDArray]], size: int) -> tuple[mx.nd.NDArray, ...]:
        """The sums, and after them the counts, of one shard's parts, each of shape (1,)."""
        pairs = list(pairs)
        right = all(isinstance(pair, (list, tuple)) and [array.size for array in pair] == [1, 1] for pair in pairs)
        if len(pairs) != len(self._names) or not right:
            raise BatchMismatch(
                f"the loss has the parts {', '.join(self._names)}, so it returns {len(self._names)} pairs (sum, count) "
                f"of arrays of one value; got {len(pairs)} of another form"
            )
        return tuple(as_legacy(array).reshape((1,)) for arrays in zip(*pairs) for array in arrays)

    def _together(self, own: list[mx.nd.NDArray]) -> mx.nd.NDArray:
        """Add up sums and counts, (2 * parts,), over the devices and the processes; returns the counts, at least 1."""
        device = own[0].context
        own = [values.as_in_context(device) for values in own]
        total = self._sum.start(sum(own[1:], own[0])).array.as_in_context(device).astype("float32")
        num = len(self._names)
        sums, counts = total[:num], nd.maximum(total[num:], 1)
        self.parts = {name: (sums / counts)[part : part + 1] for part, name in enumerate(self._names)}
        return counts
