"""Asynchronous training of several devices of one process, each with a thread and a net of its own."""

import copy
import functools
import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Callable, NamedTuple, Optional

import numpy as np

from ..archive import Archive, described, refuse_differences
from ..errors import CheckpointError, NotFinite, WorkerTimeout
from ..mxnet.compat import mx
from ..mxnet.device_threads.thread import State
from ..split import as_devices
from . import rules
from .parameter_server import Grant, ParameterServer, Staleness, frozen
from .policies import create_store, parse_mode
from .replica import Replica
from .rules import Array

_GRACE = 30.0  # seconds that a thread has to finish the step that it is in when all shall end


class Stopped(Exception):
    """Another worker failed, or the pass was interrupted: end without an error."""


class WorkerThreads:
    """One thread per worker of a server, each in the NumPy mode and scopes of the thread that calls :meth:`run`.

    They use the server through this object alone, one at a time; the first failure ends all of them, and so
    do `timeout` seconds without any push.
    """

    def __init__(self, server: ParameterServer, timeout: float) -> None:
        self.server, self.timeout = server, timeout
        self._lock = threading.Lock()
        self._has_pushed = threading.Condition(self._lock)  # notified after each push
        self._ended = threading.Condition()  # notified when a thread ends; Ctrl-C in its wait spares the workers' lock
        self._running: set[threading.Thread] = set()
        self._failure: Optional[BaseException] = None
        self._stopped = False
        self._pushes = 0

    def run(self, work: Callable[[int], None], batches: Iterable[Any]) -> None:
        """Begin a pass over the batches, and call ``work(worker)`` once in every thread until all have returned.

        Raises the first exception of `work`; WorkerTimeout: nothing was pushed in time, or a thread does not end.
        """
        self.server.begin(batches)
        self._failure, self._stopped = None, False
        threads = [
            threading.Thread(target=self._run, args=(work, worker, State()), name=f"worker {worker}", daemon=True)
            for worker in range(self.server.num_workers)
        ]
        try:
            for thread in threads:
                self._running.add(thread)  # before start(), within which Ctrl-C may come
                thread.start()
            self._watch()
        finally:
            self._join(threads)
        if self._failure is not None:
            raise self._failure

    def _run(self, work: Callable[[int], None], worker: int, state: State) -> None:
        failure: Optional[BaseException] = None
        try:
            state.call(work, worker)
        except Stopped:
            pass
        except BaseException as error:  # it is raised where run() was called
            failure = error
        with self._lock:
            if self._failure is None:
                self._failure = failure
            self._running.discard(threading.current_thread())
        with self._ended:
            self._ended.notify()

    def _watch(self) -> None:
        """Wait until all threads have ended or one has failed."""
        pushes, limit = -1, 0.0
        with self._ended:
            while self._running and self._failure is None:
                if self._pushes != pushes:
                    pushes, limit = self._pushes, time.monotonic() + self.timeout
                elif time.monotonic() > limit:
                    late = ", ".join(f"worker {worker}" for worker in self.server.waiting_for()) or "nobody"
                    raise WorkerTimeout(
                        f"nothing was pushed for {self.timeout:g} s; {late} had a batch. Look for what holds it up, "
                        "take a mode that does not wait for the slowest (async, dc, backup), or a longer timeout"
                    )
                self._ended.wait(0.1)

    def _join(self, threads: list[threading.Thread]) -> None:
        """Tell all threads to end, and wait for them.

        ``Thread.join`` is asked only when a thread is about to end: before Python 3.13, Ctrl-C within it marks a thread
        as stopped that still runs, and from then on nobody can wait for it.
        """
        with self._lock:
            self._stopped = True
            self._has_pushed.notify_all()
        with self._ended:
            self._ended.wait_for(lambda: not self._running, 1.0)  # a thread that has just been started gets its ident
            self._running -= {thread for thread in threads if thread.ident is None}  # Ctrl-C came before its start
            if not self._ended.wait_for(lambda: not self._running, _GRACE):
                late = ", ".join(thread.name for thread in threads if thread in self._running)
                raise WorkerTimeout(f"{late} did not end within {_GRACE:g} s after they were told to stop")
        for thread in threads:
            if thread.ident is not None:
                thread.join()

    def next(self, worker: int) -> Optional[Grant]:
        """Wait until the worker may start; returns None when the pass is over for it, and raises Stopped if for all."""
        with self._lock:
            while not self._stopped:
                grant = self.server.take(worker)
                if grant is not None or self.server.is_gone(worker):
                    return grant
                self._has_pushed.wait()
        raise Stopped

    def push(self, worker: int, gradient: Array, num_samples: float = 1) -> None:
        """Hand in a gradient; raises Stopped as :meth:`next`."""
        with self._lock:
            if self._stopped:
                raise Stopped
            self.server.push(worker, gradient, num_samples)
            self._pushes += 1
            self._has_pushed.notify_all()


class Pass(NamedTuple):
    """The results of one pass over the batches."""

    loss: float  # mean over its samples, each at the weights that its worker had pulled
    num_samples: int
    updates: int  # versions of the weights that it made
    seconds: float
    steps: tuple[int, ...]  # of each worker
    staleness: Staleness  # of its updates


class Asynchronous:
    """Train copies of a net on several devices that wait for each other as much or as little as `mode` says.

    Every device has a thread and a replica. It pulls the newest weights, computes the gradient of one batch, and
    pushes it; the mode says what happens with it. Batches are not cut: each goes to one worker.
    In every mode the learning rate is for a round: one batch on each worker.

    Args:
        make_net: called once per device without arguments, returns a new Gluon block. (Hybridized blocks are not
            safe to call from several threads.) All start with the first one's weights.
        loss, reduction: as of :class:`gluon_parallel.DataParallel`.
        devices: list of ``mx.Context``.
        mode: ``"sync"``, ``"backup:1"``, ``"ssp:2"``, ``"local:8"``, ``"elastic:0.9"``, ``"async"`` or ``"dc:0.04"``,
            see :func:`parse_mode`.
        optimizer: ``"sgd"`` or ``"adam"``: those whose rules are pure functions here, see :mod:`.rules`.
        optimizer_params: as for ``gluon.Trainer``. The attribute ``learning_rate`` may be set between two passes.
        clip_global_norm: every worker scales its gradient down to this norm before it pushes it.
        reject_above: do not apply gradients that are staler than this (``ssp``, ``async``, ``dc``).
        timeout: seconds without any push before it is an error.

    Raises:
        ValueError: an argument makes no sense.
        ConfigError: there is no such mode or optimizer, or they make no sense with so many devices.
        AsynchronousUnsupported: the net has a layer in which devices meet, or weights that are not float32.

    Example:
        >>> from gluon_parallel.mxnet.compat import mx
        >>> parallel = Asynchronous(lambda: mx.gluon.nn.Dense(1, in_units=3), mx.gluon.loss.L2Loss(),
        ...     [mx.cpu(0), mx.cpu(1)], "ssp:1", "sgd", {"learning_rate": 0.1})
        >>> batch = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
        >>> done = parallel.train([batch] * 6)
        >>> done.num_samples, done.updates, sum(done.steps)
        (24, 6, 6)
    """

    def __init__(self, make_net: Callable[[], Any], loss: Callable, devices: Sequence[Any], mode: str = "async",
                 optimizer: str = "sgd", optimizer_params: Optional[dict] = None,
                 clip_global_norm: Optional[float] = None, reject_above: Optional[int] = None, timeout: float = 600.0,
                 reduction: Optional[str] = None) -> None:  # fmt: skip
        params = dict(optimizer_params or {})
        self.learning_rate = params.pop("learning_rate", 0.01)
        self._update = rules.optimizer(optimizer, params)
        self.mode = parse_mode(mode)
        self.devices, self.timeout = as_devices(devices), timeout
        self.clip_global_norm, self.reject_above = clip_global_norm, reject_above
        if isinstance(make_net, mx.gluon.Block):
            raise ValueError("make_net is a net, expected a function that makes one for each device: lambda: LeNet()")
        nets = [make_net() for _ in self.devices]
        if len({id(net) for net in nets}) < len(nets):
            raise ValueError("make_net returned the same block twice; build a new one at every call")
        self._replicas = [Replica(net, loss, device, reduction) for net, device in zip(nets, self.devices)]
        self._threads: Optional[WorkerThreads] = None  # from the first pass on
        self._observing = threading.Lock()
        self._restored: Optional[Archive] = None
        self._new_server(np.zeros(1, np.float32))  # a check, before the first batch, that the mode fits the workers

    def _new_server(self, weights: Array) -> ParameterServer:
        num = len(self.devices)
        return create_store(self.mode, weights, num, self._update, self.learning_rate, self.reject_above)

    @property
    def net(self) -> Any:
        """The first device's net; after :meth:`train` it has the shared weights, and all replicas' mean statistics."""
        return self._replicas[0].net

    @property
    def staleness(self) -> Staleness:
        """Of all updates so far, once the first pass has begun."""
        return self._begun().server.staleness

    def _begun(self) -> WorkerThreads:
        if self._threads is None:
            raise ValueError("nothing was trained yet; call train(batches) first")
        return self._threads

    def train(self, batches: Iterable[Any], observe: Optional[Callable[[float, int], None]] = None) -> Pass:
        """Train on every batch once; at the end all devices wait for each other, and the nets have the weights.

        Args:
            batches: of ``(inputs, labels)``, each an array or a tuple of arrays with the same number of samples.
            observe: ``observe(loss, num_samples)`` is called after every push, one call at a time.

        Raises:
            Exception: whatever a worker raised, with that worker's traceback; the others were stopped.
            WorkerTimeout: nothing was pushed for `timeout` seconds, or a thread did not end.
            NotFinite: a loss became NaN or infinite.
            KeyboardInterrupt: Ctrl-C; all threads have ended before it is passed on.
        """
        iterator = iter(batches)
        head = list(itertools.islice(iterator, 1))
        if not head:
            raise ValueError("train got no batch")
        if self._threads is None:
            for replica in self._replicas:
                replica.prepare(head[0])
                replica.set_statistics(self._replicas[0].get_statistics())  # and what is frozen
            server = self._new_server(self._replicas[0].get_weights())
            if self._restored is not None:
                self._fill(server, self._restored)
            self._threads = WorkerThreads(server, self.timeout)
        server = self._threads.server
        server.lr = self.learning_rate
        results: list[tuple[int, float, int]] = []
        version, before, begin = server.version, copy.deepcopy(server.staleness), time.perf_counter()
        work = functools.partial(self._work, results=results, observe=observe)
        self._threads.run(work, itertools.chain(head, iterator))
        for replica in self._replicas:
            replica.set_weights(server.weights)
        self._average_statistics([replica.get_statistics() for replica in self._replicas])
        num_samples = sum(count for _, _, count in results)
        return Pass(
            loss=sum(loss * count for _, loss, count in results) / num_samples,
            num_samples=num_samples,
            updates=server.version - version,
            seconds=time.perf_counter() - begin,
            steps=tuple(sum(who == worker for who, _, _ in results) for worker in range(len(self._replicas))),
            staleness=server.staleness.since(before),
        )

    def _work(self, worker: int, results: list, observe: Optional[Callable]) -> None:
        threads, replica = self._begun(), self._replicas[worker]
        while (grant := threads.next(worker)) is not None:
            loss, gradient, count = replica.gradient(grant.weights, grant.batch)
            if not np.isfinite(loss):
                raise NotFinite(
                    f"worker {worker} on {replica.device}, batch {grant.number}: the loss is {loss}. Take a smaller "
                    "learning rate, the more so, the staler gradients are; or look for NaN in the data"
                )
            threads.push(worker, rules.clip(gradient, self.clip_global_norm), count)
            results.append((worker, loss, count))
            if observe is not None:
                with self._observing:
                    observe(loss, count)

    def _average_statistics(self, found: list[list[np.ndarray]]) -> None:
        means = [np.mean(arrays, axis=0, dtype=np.float64).astype(arrays[0].dtype) for arrays in zip(*found)]
        for replica in self._replicas:
            replica.set_statistics(means)

    def state(self) -> Archive:
        """The shared weights, the optimizer's state and the running statistics, to be saved between two passes.

        Parameters are named as :func:`gluon_parallel.checkpoint.state` names them, so that
        ``gp.checkpoint.restore(archive, net)`` loads them into a net of the same architecture. What single workers keep
        in ``local`` and ``elastic`` is not part of it: they start from the shared weights.
        """
        server, replica = self._begun().server, self._replicas[0]
        arrays = {f"parameters/{name}": array for name, array in replica.named(server.weights).items()}
        arrays.update({f"optimizer/{index}": np.asarray(value) for index, value in enumerate(server.state)})
        return Archive(arrays, {"net": type(replica.net).__name__, "asynchronous": True})

    def restore(self, archive: Archive, source: str = "the checkpoint") -> None:
        """Go on from a saved state; before the first :meth:`train`. `source` is what the error calls it.

        Raises:
            CheckpointError: it was saved by something else; at the first :meth:`train`: it is of another architecture.
        """
        if "asynchronous" not in archive.facts:
            raise CheckpointError(f"{source} was not saved by asynchronous training; begin a new run, or keep its mode")
        if self._threads is not None:
            raise ValueError("restore comes before the first train()")
        self._restored = archive

    def _fill(self, server: ParameterServer, archive: Archive) -> None:
        """Put a saved state into a server that nobody uses yet."""
        replica = self._replicas[0]
        wanted = replica.named(server.weights)
        saved = {key.partition("/")[2]: one for key, one in archive.arrays.items() if key.startswith("parameters/")}
        expected = {name: described(array) for name, array in wanted.items()}
        found = {name: [array] for name, array in saved.items()}
        what = f"the checkpoint is of another architecture than this {type(replica.net).__name__}"
        refuse_differences(expected, found, what)
        values, num = [saved[name] for name in wanted], len(wanted) - len(replica.get_statistics())
        server.weights = frozen(rules.concatenate(values[:num]))
        self._average_statistics([values[num:]])
        state = [archive.arrays[key] for key in sorted(archive.arrays) if key.startswith("optimizer/")]
        shapes = (), server.weights.shape
        if not all(array.shape in shapes and array.dtype.kind in "fi" for array in state):
            raise CheckpointError(f"the checkpoint has another optimizer state: {', '.join(map(described, state))}")
        server.state = tuple(array if array.ndim else array.item() for array in state)
