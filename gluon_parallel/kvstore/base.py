"""Base class of this package's stores: MXNet's methods, without an optimizer on the store."""

from __future__ import annotations

import functools

from ..compat import mx
from ..errors import SparseUnsupported


class Store(mx.kvstore.KVStoreBase):
    """A store that sums gradients; the update runs on the devices. ``type`` is its name.

    MXNet's ``init``, ``push`` and ``pull`` are there for programs that are written with them. The store keeps an array
    per key for them; ``pushpull`` needs none.
    """

    @staticmethod
    def is_capable(capability):
        """Whether the store can run the optimizer: no, the update runs on the devices."""
        if capability.lower() == "optimizer":
            return False
        raise ValueError(f"capability {capability!r} is not known; MXNet asks for 'optimizer'")

    def init(self, key, value):
        """Keep rank 0's `value` under `key`, in every process; all call it.

        Args:
            key: a number or a name; or a list of them, with a list of values.
            value: dense NDArray, or one per device, of which the first counts.

        Raises:
            ValueError: the key is there already.
        """
        for one, array in _pairs(key, value):
            if one in self._kept:
                raise ValueError(f"store {self.type!r}, key {one}: it has been initialized already")
            first = as_list(array)[0]
            kept = first.copy()
            self.broadcast(one, first, kept)
            self._kept[one] = kept

    def push(self, key, value, priority=0):
        """Replace what is kept under `key` by the sum of all processes' `value` arrays.

        Args:
            key, value, priority: as for ``pushpull``.

        Raises:
            ValueError: the key was not initialized.
        """
        for one, arrays in _pairs(key, value):
            self.pushpull(one, arrays, out=self._kept_under(one), priority=priority)

    def pull(self, key, out, priority=0, ignore_sparse=True):
        """Copy what is kept under `key` to every array in `out`.

        Args:
            key: a number or a name; or a list of them, with a list of the others.
            out: NDArray, or one per device.
            priority: not used; copies start when the arrays are ready.
            ignore_sparse: as MXNet's: leave sparse arrays as they are, or refuse them.

        Raises:
            ValueError: the key was not initialized.
            SparseUnsupported: an array is sparse, and `ignore_sparse` is False.
        """
        for one, arrays in _pairs(key, out):
            for array in as_list(arrays):
                if array.stype == "default":
                    self._kept_under(one).copyto(array)
                elif not ignore_sparse:
                    self.row_sparse_pull(one)

    def row_sparse_pull(self, key, out=None, priority=0, row_ids=None):
        """Refused: only dense arrays are kept and summed."""
        raise SparseUnsupported(
            f"store {self.type!r}, key {key}: only dense arrays are kept and summed, not row_sparse ones. Build the "
            "layer with sparse_grad=False, or use dist_sync"
        )

    @functools.cached_property
    def _kept(self):
        return {}  # key -> NDArray

    def _kept_under(self, key):
        if key not in self._kept:
            raise ValueError(f"store {self.type!r}, key {key}: nothing is kept under it; call init first, or pushpull")
        return self._kept[key]

    def set_optimizer(self, optimizer):
        """Refused: the update runs on the devices."""
        raise ValueError(
            f"the store {self.type!r} runs no optimizer; write gluon.Trainer(..., update_on_kvstore=False)"
        )


def _pairs(key, value):
    return zip(key, value) if isinstance(key, (list, tuple)) else [(key, value)]


def as_list(arrays):
    """The NDArrays that a caller handed over as a list, a tuple or one alone.

    Example:
        >>> as_list((1, 2)), as_list(3)
        ([1, 2], [3])
    """
    return list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
