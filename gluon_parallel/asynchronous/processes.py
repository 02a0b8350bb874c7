"""Asynchronous modes over processes: averaging of weights (`local`), and weights on servers (`async`)."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Callable, Optional

import numpy as np

from ..allreduce import allreduce_each
from ..allreduce.gradients import clip
from ..errors import AsynchronousUnsupported
from ..kvstore.contract import contract
from ..kvstore.reserved_keys import CLOCK
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_legacy, as_tuple
from ..split import as_devices
from .parameter_server import Staleness
from .policies import Mode, parse_mode
from .replica import MeanGradient
from .training import Pass

_WHY_NOT = {
    "backup": "a summing store waits for all processes at every step, and cannot leave one out",
    "ssp": "MXNet's servers keep no count of anybody's steps, so nobody could be held back",
    "elastic": "MXNet's servers take gradients in and give weights out; the worker's half of the attraction is missing",
    "dc": "the server would need the weights that each worker pulled; MXNet's DCASGD keeps one backup for all of them",
}


def check_store(mode: str, store: Any) -> Mode:
    """Parse `mode` and check that it works across processes with this store.

    Raises AsynchronousUnsupported, which says why not, and which mode or store does.

    Example:
        >>> check_store("local:8", mx.kv.create("local"))
        Mode(name='local', value=8)
    """
    parsed = parse_mode(mode)
    served = contract(store).is_asynchronous
    if parsed.name in _WHY_NOT:
        raise AsynchronousUnsupported(
            f"mode {mode} is not available across processes: {_WHY_NOT[parsed.name]}. Take sync or local:H (any "
            "summing store), or async (dist_async); within one process there are all modes"
        )
    if parsed.name == "async" and not served:
        raise AsynchronousUnsupported(
            f"mode async needs the store dist_async, whose servers take each gradient when it comes, got {store.type}: "
            "gluon-parallel launch --engine ps starts servers, and a script of ours then takes --kvstore dist_async"
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


# MXNet's servers keep weights and an optimizer, no more. So the count of updates is one more weight, the clock,
# which the optimizer that the server is sent treats in its own way; what it has counted comes back when it is pulled.
MOST = 255  # what is staler than this is counted as this


class Counting(mx.optimizer.Optimizer):
    """The optimizer that travels to the server: `inner` for all weights, and :func:`tick` for the clock."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def create_state_multi_precision(self, index, weight):
        return None if index == CLOCK else self.inner.create_state_multi_precision(index, weight)

    def update_multi_precision(self, index, weight, grad, state):
        if index == CLOCK:
            weight[:] = tick(weight.asnumpy(), grad.asnumpy())
        else:
            self.inner.update_multi_precision(index, weight, grad, state)


def tick(clock: np.ndarray, message: np.ndarray) -> np.ndarray:
    """The clock after a step.

    It is the number of steps and a histogram of staleness for every worker, (1 + num_workers * 256,), in float32, which
    counts to 16 million. `message` is the worker and the number of steps when it pulled its weights, padded with zeros:
    what is pushed under a key has its weight's length.

    Example:
        >>> clock = tick(tick(np.zeros(513), np.array([1.0, 0.0])), np.array([0.0, 0.0]))
        >>> clock[[0, 1 + 256, 1 + 1]].tolist()  # steps; worker 1's fresh one; worker 0's that was one step old
        [2.0, 1.0, 1.0]
    """
    clock = clock.copy()
    worker, pulled = int(message[0]), message[1]
    staleness = int(min(clock[0] - pulled, MOST))
    clock[1 + worker * (MOST + 1) + staleness] += 1
    clock[0] += 1
    return clock


class Served(MeanGradient):
    """``async`` across processes: the weights and the optimizer live on MXNet's servers (``dist_async``).

    Each process pulls the newest weights, computes the mean gradient over its devices, and pushes it; the server
    updates at once. The learning rate is that of a round of all processes, as everywhere in this folder. Running
    statistics (of BatchNorm) stay each process's own.

    The servers must import this package before they serve, so that they can count the staleness of every update; those
    of ``gluon-parallel launch --engine ps`` do.

    Args:
        net: a Gluon block, initialised on all `devices`. All processes begin with the weights of rank 0.
        devices: those of this process.
        store: ``dist_async``.
        optimizer, optimizer_params: what ``mx.optimizer.create`` takes. The server keeps them: a learning rate that
            shall change has to travel along as ``lr_scheduler``.
        clip_global_norm: each process scales its mean gradient down to this norm.
        loss, reduction: as of :class:`gluon_parallel.DataParallel`.

    Raises:
        AsynchronousUnsupported: the store is another one, or the net has layers in which devices meet.
    """

    def __init__(self, net: Any, loss: Callable, devices: Sequence[Any], store: Any, optimizer: str = "sgd",
                 optimizer_params: Optional[dict] = None, clip_global_norm: Optional[float] = None,
                 reduction: Optional[str] = None) -> None:  # fmt: skip
        check_store("async", store)
        super().__init__(net, loss, as_devices(devices), reduction)
        self.store, self.clip_global_norm = store, clip_global_norm
        params = dict(optimizer_params or {})
        params["learning_rate"] = params.get("learning_rate", 0.01) / store.num_workers
        self._others = [one for one in net.collect_params().values() if one.grad_req == "null"]
        for key, parameter in enumerate((*self._trained, *self._others)):
            store.init(key, parameter.list_data()[0])
        self._clock = mx.nd.zeros(1 + store.num_workers * (MOST + 1), ctx=mx.cpu())  # as it was pulled last
        store.init(CLOCK, self._clock)
        store.set_optimizer(Counting(mx.optimizer.create(optimizer, **params)))
        self.pull()
        for key, parameter in enumerate(self._others, len(self._trained)):
            self.store.pull(key, out=parameter.list_data(), priority=-key)

    @property
    def staleness(self) -> Staleness:
        """Of all processes' updates until the last :meth:`pull`, as the server counted them."""
        found = Staleness(self.store.num_workers)
        for worker, at in np.argwhere(counts := self._clock[1:].asnumpy().reshape(-1, MOST + 1)).tolist():
            found.histograms[worker][at] = int(counts[worker, at])
        return found

    def pull(self) -> None:
        """Take the newest weights."""
        self.store.pull(CLOCK, out=self._clock)
        self._clock.wait_to_read()  # before the weights, so that staleness is never understated
        for key, parameter in enumerate(self._trained):
            self.store.pull(key, out=parameter.list_data(), priority=-key)

    def train(self, batches: Iterable[Any], observe: Optional[Callable[[float, int], None]] = None) -> Pass:
        """Train on this process's batches once; a batch without samples is passed over.

        Arguments and return are those of :meth:`Asynchronous.train`, except that the staleness is that of all
        processes' updates meanwhile, and `updates` and `steps` are this process's.
        """
        total, samples, steps, begin, before = 0.0, 0, 0, time.perf_counter(), self.staleness
        for inputs, labels in batches:
            if not len(as_tuple(inputs)[0]):
                continue  # there are fewer samples in the last batch than processes
            self.pull()
            loss, count = self.run((inputs, labels))
            self._push()
            value = loss.asnumpy().item()
            total, samples, steps = total + value * count, samples + count, steps + 1
            if observe is not None:
                observe(value, count)
        if not steps:
            raise ValueError("train got no batch")
        self.pull()
        seconds = time.perf_counter() - begin
        return Pass(total / samples, samples, steps, seconds, (steps,), self.staleness.since(before))

    def _push(self) -> None:
        """Push the sum of this process's gradients, and then tell the clock."""
        allreduce_each([parameter.list_grad() for parameter in self._trained])
        gradients = [as_legacy(parameter.list_grad()[0]) for parameter in self._trained]
        if self.clip_global_norm is not None:
            clip([[gradient] for gradient in gradients], self.clip_global_norm)
        for key, gradient in enumerate(gradients):
            self.store.push(key, gradient, priority=-key)
        message = np.zeros(self._clock.shape, np.float32)
        message[:2] = self.store.rank, self._clock[0].asscalar()
        self.store.push(CLOCK, mx.nd.array(message, ctx=mx.cpu()))
