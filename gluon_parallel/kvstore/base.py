"""What the stores of this package have in common: nobody runs the optimizer on them."""

from __future__ import annotations

from ..compat import mx

FIRST_COUNT = (1 << 20) - 64  # keys from here on carry what processes count and measure; gradients stand before it


class Store(mx.kvstore.KVStoreBase):
    """A store that sums gradients; the update runs on the devices. ``type`` is its name."""

    @staticmethod
    def is_capable(capability):
        """Whether the store can run the optimizer: no, the update runs on the devices."""
        if capability.lower() == "optimizer":
            return False
        raise ValueError(f"capability {capability!r} is not known; MXNet asks for 'optimizer'")

    def set_optimizer(self, optimizer):
        """Refused: the update runs on the devices."""
        raise ValueError(
            f"the store {self.type!r} runs no optimizer; write gluon.Trainer(..., update_on_kvstore=False)"
        )


def as_list(arrays):
    """The NDArrays that a caller handed over as a list, a tuple or one alone.

    Example:
        >>> as_list((1, 2)), as_list(3)
        ([1, 2], [3])
    """
    return list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]
