"""Base class of our stores: MXNet's methods, without an optimizer on the store."""

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from ..errors import ArrayMismatch, SparseUnsupported
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_tuple
from .contract import Contract
from .handshake import signature
from .protocols import Arrays, Keys, SparseSums, offers


class Store(Contract, mx.kvstore.KVStoreBase):
    """A store that sums gradients; the update runs on the devices.

    A store over another transport connects the processes, sets `rank` and `num_workers` and calls ``_open(library)`` in
    its constructor, and has ``_broadcast`` and ``_sum``; what it can do beyond sums are the methods of
    :mod:`.protocols`.

    MXNet's ``init``, ``push`` and ``pull`` are there for programs that are written with them: for them alone the store
    keeps an array per key.
    """

    rank: int = 0
    num_workers: int = 1

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store can run the optimizer: no, the update runs on the devices."""
        if capability.lower() == "optimizer":
            return False
        raise ValueError(f"capability {capability!r} is not known; MXNet asks for 'optimizer'")

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Every array in `out`, in every process, becomes rank 0's `value`.

        Args:
            key: a number or a name; or a list of them, with lists of the others.
            value: NDArray, or one per device, of which the first counts.
            out: NDArray or list of NDArrays.
            priority: a higher one starts earlier.

        Raises:
            WorkersDiffer: another process sends another shape or dtype, or under another key.
            WorkerLost: another process sends nothing within ``GLUON_PARALLEL_TIMEOUT``.
        """
        for one, values, outs in zip(key, value, out) if _is_list(key) else [(key, value, out)]:
            self._broadcast(one, as_tuple(values)[0], as_tuple(outs), priority)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Every array in `out`, in every process, becomes the sum of all processes' `value` arrays.

        Args:
            key: a number or a name; or a list of them, with lists of the others.
            value: NDArray, or one NDArray per device.
            out: the same; by default `value`.
            priority: a higher one starts earlier.

        Raises:
            SparseUnsupported: an array is not dense. The store ``mpi`` also sums ``row_sparse`` arrays of one key, and
                waits for them.
            ArrayMismatch: arrays of this process differ in shape or dtype.
            WorkerLost, WorkersDiffer: an earlier exchange has failed.
        """
        if _is_list(key):
            outs = value if out is None else out
            self._sum_all(key, list(map(as_tuple, value)), list(map(as_tuple, outs)), priority)
            return
        values = value if _is_list(value) else (value,)
        self._sum(key, values, values if out is None else out if _is_list(out) else (out,), priority)

    def _broadcast(self, key: Hashable, value: Any, outs: Sequence[Any], priority: int) -> None:
        """:meth:`broadcast` of one key."""
        raise NotImplementedError

    def _sum_all(self, keys: Keys, values: Arrays, outs: Arrays, priority: int) -> None:
        """:meth:`pushpull` of several keys; the first ones start earlier."""
        for number, one in enumerate(zip(keys, values, outs)):
            self._sum(*one, priority - number)

    def _sum(self, key: Hashable, values: Sequence[Any], outs: Sequence[Any], priority: int) -> None:
        """:meth:`pushpull` of one key; `outs` may be `values`, and arrays ``mx.np`` ones.

        It waits for nothing. Calls of one key keep their order; keys may come in another order on each process, and one
        may need another's result first, so no thread of the engine may wait: see ``push_async`` of
        ``mxnet/engine``, with a thread of the store's own that receives. (``tests/support/file_store.py`` waits here,
        and needs one order.)
        """
        raise NotImplementedError

    def _check(self, key: Hashable, arrays: Sequence[Any]) -> None:
        for array in arrays:
            if array.stype != "default":
                raise SparseUnsupported(
                    f"store {self.type!r}, key {key}: the array on {array.ctx} is {array.stype}, expected a dense one. "
                    "Build the layer with sparse_grad=False, or use the store mpi, which sums row_sparse gradients"
                )
        self._check_alike(key, arrays)

    def _check_alike(self, key: Hashable, arrays: Sequence[Any]) -> None:
        first = arrays[0]
        for array in arrays:
            if array.shape != first.shape or array.dtype != first.dtype:
                raise ArrayMismatch(
                    f"store {self.type!r}, key {key}: {signature(array)} on {array.ctx}, but {signature(first)} on "
                    f"{first.ctx}; a key's arrays must be alike"
                )

    def init(self, key: Any, value: Any) -> None:
        """Keep rank 0's `value` under `key`, in every process, as :meth:`broadcast` takes them; once per key."""
        for one, array in pairs(key, value):
            if one in self._kept:
                raise ValueError(f"store {self.type!r}, key {one}: it has been initialized already")
            first = as_tuple(array)[0]
            kept = first.copy()
            self.broadcast(one, first, kept)
            self._kept[one] = kept

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Replace what is kept under `key`, which was initialized, by the sum of all processes' `value` arrays."""
        for one, arrays in pairs(key, value):
            if not offers(self, SparseSums):
                self._check(one, as_tuple(arrays))
            self.pushpull(one, arrays, out=self._kept_under(one), priority=priority)

    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy what is kept under `key`, which was initialized, to every array in `out`.

        Sparse arrays stay as they are, or are refused if `ignore_sparse` is False, as by MXNet.
        """
        for one, arrays in pairs(key, out):
            for array in as_tuple(arrays):
                if array.stype == "default":
                    self._kept_under(one).copyto(array)
                elif not ignore_sparse:
                    self.row_sparse_pull(one)

    def row_sparse_pull(self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None) -> None:
        """Refused: only dense arrays are kept."""
        raise SparseUnsupported(
            f"store {self.type!r}, key {key}: only dense arrays are kept, not row_sparse ones. Use a dense weight, "
            "with row_sparse gradients over the store mpi, or dist_sync"
        )

    @functools.cached_property
    def _kept(self) -> dict[Hashable, Any]:
        return {}  # key -> NDArray

    def _kept_under(self, key: Hashable) -> Any:
        if key not in self._kept:
            raise ValueError(f"store {self.type!r}, key {key}: nothing is kept under it; call init first, or pushpull")
        return self._kept[key]

    def set_optimizer(self, optimizer: Any) -> None:
        """Refused: the update runs on the devices."""
        raise ValueError(
            f"the store {self.type!r} runs no optimizer; write gluon.Trainer(..., update_on_kvstore=False)"
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def pairs(key: Any, value: Any) -> Iterable[tuple[Hashable, Any]]:
    """(key, its arrays) of what a store is handed: a key, or a list of them with a list of their arrays."""
    return zip(key, value) if _is_list(key) else [(key, value)]
