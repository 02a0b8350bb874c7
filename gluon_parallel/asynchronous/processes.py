"""Across processes: weights on MXNet's servers, which update at once; or averaged every few steps over any store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Callable, Optional

from ..allreduce import allreduce
from ..compat import mx
from ..errors import AsynchronousUnsupported
from ..split import num_samples, split_and_load
from .mode import Mode, parse_mode
from .replica import as_tuple, refuse_meeting_layers
from .training import Pass

_WHY_NOT = {
    "backup": "a summing store waits for all processes at every step, and cannot leave one out",
    "ssp": "MXNet's servers keep no count of anybody's steps, so nobody could be held back",
    "elastic": "MXNet's servers take gradients in and give weights out; the worker's half of the attraction is missing",
    "dc": "the server would need the weights that each worker pulled; MXNet's DCASGD keeps one backup for all of them",
}


def check_store(mode: str, store: Any) -> Mode:
    """Tell whether a mode is to be had across processes with this store.

    Args:
        mode: see :func:`parse_mode`.
        store: what ``gp.kvstore.create`` or ``mx.kv.create`` returned.

    Returns:
        The mode.

    Raises:
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
            "comes; in a summing store all processes have to meet"
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

    Raises:
        AsynchronousUnsupported: the store does not sum.

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


class Served:
    """``async`` across processes: the weights and the optimizer live on MXNet's servers (``dist_async``).

    Each process pulls the newest weights, computes the mean gradient over its devices, and pushes it; the server
    updates at once. The learning rate is that of a round of all processes, as everywhere in this room.

    Args:
        net: a Gluon block, initialised on all `devices`. All processes begin with the weights of rank 0.
        loss: a Gluon loss, one value per sample.
        devices: those of this process.
        store: ``dist_async``.
        optimizer, optimizer_params: what ``mx.optimizer.create`` takes. The server keeps them: a learning rate that
            shall change has to travel along as ``lr_scheduler``.
        clip_global_norm: each process scales its mean gradient down to this norm.

    Raises:
        AsynchronousUnsupported: the store is another one, or the net has layers in which devices meet.
    """

    def __init__(
        self,
        net: Any,
        loss: Callable,
        devices: Sequence[Any],
        store: Any,
        optimizer: str = "sgd",
        optimizer_params: Optional[dict] = None,
        clip_global_norm: Optional[float] = None,
    ) -> None:
        check_store("async", store)
        refuse_meeting_layers(net)
        self.net, self.loss, self.devices, self.store = net, loss, list(devices), store
        self.clip_global_norm = clip_global_norm
        params = dict(optimizer_params or {})
        params["learning_rate"] = params.get("learning_rate", 0.01) / store.num_workers
        self._trained = [p for p in net.collect_params().values() if p.grad_req != "null"]
        for key, parameter in enumerate(self._trained):
            store.init(key, parameter.list_data()[0])
        store.set_optimizer(mx.optimizer.create(optimizer, **params))
        self.pull()

    def pull(self) -> None:
        """Take the newest weights."""
        for key, parameter in enumerate(self._trained):
            self.store.pull(key, out=parameter.list_data(), priority=-key)

    def train(self, batches: Iterable[Any], observe: Optional[Callable[[float, int], None]] = None) -> Pass:
        """Train on this process's batches once; arguments and return as for :meth:`Asynchronous.train`."""
        total, samples, steps, begin = 0.0, 0, 0, time.perf_counter()
        for batch in batches:
            self.pull()
            loss, count = self._step(*(as_tuple(part) for part in batch))
            self._push()
            value = float(loss.asscalar())
            total, samples, steps = total + value * count, samples + count, steps + 1
            if observe is not None:
                observe(value, count)
        self.pull()
        return Pass(total / samples, samples, steps, time.perf_counter() - begin, (steps,))

    def _step(self, inputs: tuple, labels: tuple) -> tuple[Any, int]:
        count = num_samples((inputs, labels))
        shards = split_and_load((inputs, labels), self.devices)
        with mx.autograd.record():
            losses = [self.loss(*as_tuple(self.net(*x)), *y).sum() / count for x, y in shards]
        mx.autograd.backward(losses)
        for parameter in self._trained:
            for gradient in parameter.list_grad()[len(shards) :]:
                gradient[:] = 0  # a device without samples
        return mx.nd.add_n(*[loss.as_in_context(self.devices[0]) for loss in losses]), count

    def _push(self) -> None:
        """Push the sum of this process's gradients."""
        for parameter in self._trained:
            allreduce(parameter.list_grad())
        gradients = [parameter.list_grad()[0] for parameter in self._trained]
        if self.clip_global_norm is not None:
            norm = mx.nd.add_n(*[(gradient**2).sum() for gradient in gradients]).sqrt()
            scale = mx.nd.minimum(self.clip_global_norm / (norm + 1e-12), 1.0)
            for gradient in gradients:
                mx.nd.broadcast_mul(gradient, scale.reshape((1,) * gradient.ndim), out=gradient)
        for key, gradient in enumerate(gradients):
            self.store.push(key, gradient, priority=-key)
