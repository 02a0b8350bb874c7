"""A loss of parts, each a sum and a count: its form, gradient and mean."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Callable

from ..errors import BatchMismatch
from ..kvstore.contract import contract
from ..kvstore.reserved_keys import LOSS_PARTS
from ..kvstore.work import NumberSum
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested, as_current, as_legacy
from ..mxnet.device_threads.thread import apply_on, joint_pass

nd = mx.nd
Row = tuple[mx.nd.NDArray, ...]  # the sums of one shard's parts, and after them the counts, each of shape (1,)


def backward_of_parts(
    run: Callable[..., Any],
    shards: Sequence[Nested],
    sizes: Sequence[int],
    devices: Sequence[mx.Context],
    scale: float,
    parts: SumsOfParts,
) -> mx.nd.NDArray:
    """As :func:`.backward_per_sample`, of a loss of `parts`; the mean loss is that of all processes.

    All forward passes come before the first backward pass, which begins with what the counts of all devices and
    processes add up to.
    """

    def forward(shard: Nested, _size: int) -> Row:
        with mx.autograd.record():
            return parts.checked(run(*shard))

    with joint_pass():
        rows = apply_on(forward, list(zip(devices, zip(shards, sizes))))
        apply_on(go_backward, list(zip(devices, zip(rows, parts.heads(rows, scale)))))
    return parts.mean()


def go_backward(row: Row, heads: Row) -> None:
    """A backward pass from the sums of a row, which comes first in it, with these head gradients."""
    mx.autograd.backward(list(row[: len(heads)]), list(heads))


class SumsOfParts:
    """The sums and the counts of a loss of parts, over all devices and processes, step after step.

    The value of a part is its sum divided by its count, and the loss is the sum of the values.

    Attributes:
        values: {name: array of one value}, of the last step.
    """

    def __init__(self, names: Iterable[str], store: mx.kv.KVStoreBase | None) -> None:
        self._names = tuple(names)
        self._sum = NumberSum(contract(store), LOSS_PARTS, 2 * len(self._names))
        self.values: dict[str, mx.nd.NDArray] = {}

    def checked(self, pairs: Iterable[Sequence[mx.nd.NDArray]]) -> Row:
        """The row of what the loss returned for one shard; BatchMismatch: it has another form."""
        pairs = list(pairs)
        right = all(isinstance(pair, (list, tuple)) and [array.size for array in pair] == [1, 1] for pair in pairs)
        if len(pairs) != len(self._names) or not right:
            raise BatchMismatch(
                f"the loss has the parts {', '.join(self._names)}, so it returns {len(self._names)} pairs (sum, count) "
                f"of arrays of one value; got {len(pairs)} of another form"
            )
        return tuple(as_legacy(array).reshape((1,)) for arrays in zip(*pairs) for array in arrays)

    def heads(self, rows: Sequence[Row], scale: float) -> list[Row]:
        """Add up the rows of all shards; returns for each the head gradients of its sums, which hold the division."""
        values = [[value.detach().astype("float64") for value in row] for row in rows]
        counts = self._add_up([nd.concat(*row, dim=0) for row in values])
        found = []
        for row in rows:
            shares = (scale / counts).as_in_context(row[0].context).split(len(self._names), 0)
            found.append(tuple(share.astype(value.dtype) for value, share in zip(row, shares)))
        return found

    def mean(self) -> mx.nd.NDArray:
        """The loss of the whole batch of all processes, of shape (1,), after :meth:`heads`."""
        return as_current(sum(self.values.values()))

    def add_nothing(self, device: mx.Context) -> None:
        """Take part in the sums of the other processes without samples; the values are then on `device`."""
        self._add_up([nd.zeros(2 * len(self._names), ctx=device, dtype="float64")])

    def _add_up(self, own: list[mx.nd.NDArray]) -> mx.nd.NDArray:
        """Add up sums and counts, (2 * parts,), over the devices and the processes; returns the counts, at least 1."""
        device = own[0].context
        own = [values.as_in_context(device) for values in own]
        total = self._sum.start(sum(own[1:], own[0])).array.as_in_context(device).astype("float32")
        num = len(self._names)
        sums, counts = total[:num], nd.maximum(total[num:], 1)
        self.values = {name: (sums / counts)[part : part + 1] for part, name in enumerate(self._names)}
        return counts
