"""Asynchronous modes over processes: which store each mode needs, and averaging of weights (`local`)."""

from typing import Any

from ..compat import mx  # noqa: F401 - for the doctests
from ..errors import AsynchronousUnsupported
from .policies import Mode, parse_mode

_WHY_NOT = {
    "backup": "a summing store waits for all processes at every step, and cannot leave one out",
    "ssp": "MXNet's servers keep no count of anybody's steps, so nobody could be held back",
    "elastic": "MXNet's servers take gradients in and give weights out; the worker's half of the attraction is missing",
    "dc": "the server would need the weights that each worker pulled; MXNet's DCASGD keeps one backup for all of them",
}


def check_store(mode: str, store: Any) -> Mode:
    """The mode that :func:`parse_mode` reads, if it is to be had across processes with this store.

    AsynchronousUnsupported: it is not; says why, and which mode or store is.

    Example:
        >>> check_store("local:8", mx.kv.create("local"))
        Mode(name='local', value=8)
    """
    parsed = parse_mode(mode)
    served = "async" in store.type
    if parsed.name in _WHY_NOT:
        raise AsynchronousUnsupported(
            f"mode {mode} is not available across processes: {_WHY_NOT[parsed.name]}. Across processes there are sync "
            "and local:H (any summing store) and async (dist_async); within one process, all modes"
        )
    if parsed.name == "async" and not served:
        raise AsynchronousUnsupported(
            f"mode async needs the store dist_async, got {store.type}: there a server takes each gradient when it "
            "comes; in a summing store all processes have to meet. gluon-parallel launch --engine ps starts servers, "
            "and a script of ours then takes --kvstore dist_async"
        )
    if parsed.name != "async" and served:
        raise AsynchronousUnsupported(
            f"mode {mode} needs a store that sums, such as dist_sync or mpi; {store.type} applies an optimizer to "
            "whatever it is sent. Take mode async, or another store"
        )
    return parsed


class Averaging:
    """``local`` across processes: each trains by itself, and every few steps all take the mean of their weights.

    Args:
        net: a Gluon block, initialised on all devices of this process. All processes begin with the weights of rank 0.
        store: any store that sums: ``dist_sync``, ``mpi``, ``horovod``, or ``local`` for one process alone.
        every: steps between two means; all processes make equally many.

    Example:
        >>> net = mx.gluon.nn.Dense(1, in_units=2)
        >>> net.initialize()
        >>> averaging = Averaging(net, mx.kv.create("local"), every=4)
        >>> [averaging.step() for _ in range(5)]
        [False, False, False, True, False]
    """

    def __init__(self, net: Any, store: Any, every: int = 8) -> None:
        check_store(f"local:{every}", store)
        self.store, self.every = store, every
        self._steps = 0
        self._parameters = list(net.collect_params().values())
        for key, parameter in enumerate(self._parameters):
            copies = parameter.list_data()
            store.broadcast(key, copies[0], copies)

    def step(self) -> bool:
        """Count a step; returns whether the weights were averaged after it."""
        self._steps += 1
        if self._steps % self.every:
            return False
        self.average()
        return True

    def average(self) -> None:
        """Average now; call it at the end of an epoch too, so that all processes save and test the same weights."""
        if self.store.num_workers == 1:
            return
        for key, parameter in enumerate(self._parameters):
            copies = parameter.list_data()
            # One device speaks for its process: copies of weights are equal, and of running statistics we take one.
            total = copies[0].copy()
            self.store.pushpull(key, total, out=total, priority=-key)
            total /= self.store.num_workers
            for copy in copies:
                total.copyto(copy)
