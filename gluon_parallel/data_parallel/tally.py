"""A few numbers of a step that are added up over the processes, while nobody waits for them."""

from ..compat import mx

nd = mx.nd


class Tally:
    """Sums over the processes of one store, under a key of its own.

    Args:
        key: a whole number, as a trainer's keys are: a store takes numbers or names, not both.
    """

    def __init__(self, key):
        self._key = key
        self._last = None

    def open(self, store, size):
        """Tell the store of the key, before the first sum; every process must. `store` may be None."""
        if _has_company(store):
            zeros = nd.zeros(size, ctx=mx.cpu(), dtype="float64")
            store.broadcast(self._key, zeros, [zeros])

    def sum(self, store, values):
        """Start a sum, ahead of all other exchanges.

        Args:
            store: the trainer's; None without one.
            values: an array of the `size` that the tally was opened with, on any device.

        Returns:
            An array that becomes the sum, float64 on the CPU; `values` themselves where there is no other process.
        """
        if not _has_company(store):
            return values
        if self._last is not None:
            self._last.wait_to_read()  # of a step that broke off: ps-lite would add this one to that
        self._last = values.as_in_context(mx.cpu()).astype("float64")
        store.pushpull(self._key, [self._last], priority=1 << 20)
        return self._last


def _has_company(store):
    return store is not None and store.num_workers > 1
