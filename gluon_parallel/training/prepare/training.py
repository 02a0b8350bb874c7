"""`prepare` connects a script with all processes and devices, and returns a `Training` that steps for them."""

import contextlib
import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, Optional

from ... import kvstore
from ...errors import GradientUnavailable
from ...kvstore import collective
from ...kvstore.collective import broadcast_object
from ...metrics import evaluate
from ...mxnet.compat import mx
from ...mxnet.trainers import has_made_store, store_of, want_store, wanted_store
from ...nn import convert_sync_batchnorm
from ...nn.blocks import net_and_loss
from ...nn.sync_batch_norm.participants import sync_groups_of
from ...step import DataParallel
from ...step.data_parallel import expect_equal_batches
from ...survive.survival import Survival
from ..checkpoint import restore, state
from ..run import Run
from .loop import Loop
from .prediction import predict
from .train_metrics import TrainMetrics
from .unpacked import Unpacked

_OF_ONE_PROCESS = ("device", "local")  # what gluon.Trainer has where nobody named a store


def prepare(
    net: mx.gluon.Block,
    loss: Callable,
    trainer: mx.gluon.Trainer,
    *loaders: Any,
    store: Optional[Any] = None,
    sync_batch_norm: bool = False,
    sync_group: kvstore.SyncGroups = None,
    seed: int = 0,
    run: Any = None,
    saved: Optional[Mapping[str, Any]] = None,
    train_metrics: Any = (),
    **options: Any,
) -> Any:
    """Connect a training script with all devices and processes that it runs on; the same script runs alone.

    The trainer gets the store, and so do SyncBatchNorm layers without one; each loader is cut to this process's part of
    every batch, and what is returned steps, evaluates, prints and saves for all processes. A loader's ``batch_size``
    stays that of a step over everything, so the same script trains the same weights on one device and on several
    processes, except for random numbers inside the net: each device draws dropout masks of its own. Call it on all,
    before the first step.

    Args:
        net: a Gluon block, initialised on this process's devices: ``net.initialize(ctx=gp.devices("auto"))``.
        loss, options: as of :class:`DataParallel`: ``accumulate``, ``clip_global_norm``, ``reduction``, ...
        trainer: the ``gluon.Trainer`` of the net's parameters, which has made no step yet. It stays the owner of the
            optimizer and its learning rate.
        loaders: ``gluon.data.DataLoader`` or ``gp.datasets.batches``, of the whole data. A DataLoader is changed: it
            reads this process's samples of each batch from then on, and its `batchify_fn` makes a batch of those. (Of
            a batch with fewer samples than processes, some get a part with none, along `batch_axis`: methods and
            operators of its arrays work, functions of ``mx.nd`` do not.) Shuffled ones take orders that follow from
            `seed` and the epoch. One process takes any iterable, as it yields; an ``mx.io.DataIter`` is reset for each
            further pass, and its order is in no checkpoint.
        store: a KVStore; by default the trainer's, if it was given one, or ``gp.kvstore.create("auto")``, which fits
            how the process was started.
        sync_batch_norm: convert the BatchNorm layers of the net, and of a loss that is a block, to SyncBatchNorm over
            all devices and processes.
        sync_group: which processes share statistics in layers that it converts: all (None), ``"host"``, or groups of
            so many consecutive ones; `group` of ``gp.nn.SyncBatchNorm``.
        seed: of the order of the samples and of the random numbers of every step (from 0); they start anew here.
        run, saved: as of :class:`.Loop`: the folder that is written and continued from, and what is saved along.
        train_metrics: what is measured of the training steps: a metric or a list, see :meth:`Training.train_metric`.

    Returns:
        The :class:`Training`, and then the loaders in the order given; the Training alone if there are none.

    Raises:
        GradientUnavailable: the trainer has begun already, or updates on its store.
        TypeError: a loader cannot be divided; says how to do it by hand.
        StoreUnavailable, WorkerLost, WorkersDiffer: the processes do not meet; see ``gp.kvstore.create``.

    Example:
        >>> net = mx.gluon.nn.Dense(1, in_units=3)
        >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        >>> data = mx.gluon.data.ArrayDataset(mx.nd.ones((5, 3)), mx.nd.ones((5, 1)))
        >>> training, train = prepare(net, mx.gluon.loss.L2Loss(), trainer, mx.gluon.data.DataLoader(data, 4))
        >>> for x, y in train:
        ...     loss = training.step(x, y)
        >>> training, training.num_steps
        (1 process x [cpu(0), cpu(1)], 2)
    """
    if not isinstance(trainer, mx.gluon.Trainer):
        raise ValueError(
            f"trainer: expected a gluon.Trainer, got {type(trainer).__name__}; the order is "
            "prepare(net, loss, trainer, *loaders)"
        )
    known = [*inspect.signature(prepare).parameters, *inspect.signature(DataParallel).parameters]
    for option in options:
        if option not in known:
            raise TypeError(f"prepare has no argument {option!r}{_hint(option, known)}")
    store = _connected(trainer, store)
    blocks = net_and_loss(net, loss)
    if sync_batch_norm:
        convert_sync_batchnorm(blocks, group=sync_group)
    elif sync_group is not None:
        raise ValueError(
            f"prepare: sync_group={sync_group!r} belongs to the layers that prepare converts; write "
            "sync_batch_norm=True too, or build the net with gp.nn.SyncBatchNorm(group=...)"
        )
    for group in sync_groups_of(blocks):
        if group.store is None:
            group.connect(store)
    step = DataParallel(net, loss, trainer, **options)
    if loaders:  # which are divided here
        expect_equal_batches(step)
    training = Training(step, *loaders, store=store, seed=seed, run=run, saved=saved)
    if not isinstance(train_metrics, (list, tuple)) or train_metrics:
        training.train_metric(train_metrics)
    return Unpacked((training, *training.loaders)) if loaders else training


def _hint(option: str, known: Sequence[str]) -> str:
    """Where an argument belongs that ``prepare`` does not take, "" if that is not known."""
    if option == "batch_size":
        return "; the loader has it: gluon.data.DataLoader(data, batch_size=...)"
    callables: dict[str, Callable[..., Any]] = {"gp.Run": Run}
    callables.update((f"training.{name}", method) for name, method in inspect.getmembers(Training, inspect.isfunction))
    for where, function in callables.items():
        if option in inspect.signature(function).parameters:
            return f"; {where}(..., {option}=...) has it"
    close = difflib.get_close_matches(option, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _connected(trainer: mx.gluon.Trainer, store: Optional[Any]) -> Any:
    """The store through which all processes meet, which the trainer takes."""
    own = store_of(trainer) if has_made_store(trainer) else wanted_store(trainer)
    if store is None:
        given = own is not None and getattr(own, "type", own) not in _OF_ONE_PROCESS
        store = own if given else "auto"
    store = kvstore.create(store) if isinstance(store, str) else kvstore.as_store(store, "prepare")
    if has_made_store(trainer) and store is not own and store.num_workers > 1:
        raise GradientUnavailable(
            "the trainer has begun without the other processes; call gp.prepare before its first step and before its "
            "state is saved or loaded"
        )
    if not has_made_store(trainer):
        want_store(trainer, store)
    return store


class Training(Loop):
    """A net in training on all devices and processes; made by :func:`prepare`, with the attributes of :class:`Loop`.

    Attributes:
        devices: of this process.
        outputs: of the last step, as of ``DataParallel``.
    """

    def __init__(self, parallel: DataParallel, *loaders: Any, **options: Any) -> None:
        self.devices, self._parallel = parallel.devices, parallel
        super().__init__(
            *loaders, net=parallel.net, trainer=parallel.trainer, accumulate=parallel.accumulate,
            batch_axis=parallel.batch_axis, **options,
        )  # fmt: skip
        self._metrics = TrainMetrics(parallel, self.store, self._meeting, self._saved_metrics)
        if self._survival is not None:
            self._survival.progress.num_steps = self.num_steps  # of a run that continues

    def _share_net(self) -> None:
        """Nothing: the first step does, when all shapes are known."""

    def _make_survival(self) -> None:
        parallel, self._survival = self._parallel, None
        if kvstore.repeats(self.store):
            self._survival = Survival(
                parallel.step, parallel.net, parallel.trainer, self.loaders, self.store, state, restore, self._reseed,
                unfinished=lambda: parallel.mean, loop=self,
            )  # fmt: skip

    def _joins(self) -> bool:
        return self._survival is not None and self._survival.join()

    def __repr__(self) -> str:
        return f"{super().__repr__()} x {self.devices}"

    def step(self, x: Any, y: Any = ()) -> Any:
        """Train on one batch, of which this process has its part; arguments and return of ``DataParallel.step``.

        In several processes, what is returned is the mean loss of this process's part. The mean over all is in the
        log, every ``gp.Run(log_every=50)`` steps, and in the row of :meth:`end_epoch`.

        Raises:
            NotFinite: the loss of this step or one of the eight before it is NaN or infinite, or a weight since one of
                the 17 updates before; :meth:`end_epoch` notices every such weight.
            Stopped: see :meth:`epochs`.
        """
        loss = (self._survival or self._parallel.step)(x, y)
        if self._metrics:
            self._metrics.add_step()
        self.add(loss, self._parallel.num_samples, self._parallel.parts)
        return loss

    def train_metric(self, metric: Any) -> None:
        """Measure a metric of the training steps, too: ``training.train_metric("acc")``; every process calls it.

        It is updated with the outputs and labels of each step, which are those of the weights before its update. At
        :meth:`end_epoch` the table and the log get its value over the steps of all processes as ``train_accuracy``.
        Metrics that are no sums over samples, such as F1, need whole batches, which processes send to each other in
        each step. Such a metric has only the rest of an epoch that is continued in the middle, and says so.

        Args:
            metric: as of ``gp.evaluate``: a name, an ``mx.metric.EvalMetric``, a loss, or a list of those.
        """
        where = f"epoch {self.epoch + 1} has its steps after step {self.step_in_epoch}" if self.step_in_epoch else ""
        self._metrics.add(metric, where)

    def _take_metrics(self) -> dict[str, float]:
        return self._metrics.take() if self._metrics else {}

    def _sums_of_metrics(self) -> dict[str, list[float]]:
        return self._metrics.sums(self._leaves_alone) if self._metrics else {}

    def _values_of_step(self) -> dict[str, Any]:
        norm = self._parallel.gradient_norm
        return {**super()._values_of_step(), **({} if norm is None else {"gradient_norm": norm})}

    @property
    def outputs(self) -> list:
        return self._parallel.outputs

    def update(self) -> None:
        """Update with the steps that were only accumulated, if any; all processes call it.

        With ``accumulate=k``, the end of a pass over the first loader does it, and so do :meth:`end_epoch`, and
        :meth:`evaluate` and :meth:`predict` outside of such a pass: what is measured is what is saved. An average of
        the weights takes the last update of a pass in by one more ``average.update()`` behind the loop.

        Raises:
            NotFinite: a weight is NaN or infinite.
        """
        if self._parallel.has_accumulated:
            kvstore.together(self.store, self._parallel.update)
        else:  # nothing that the others take part in: they need not come here
            self._parallel.update()

    _finish_updates = update

    @contextlib.contextmanager
    def _measured(self) -> Iterator[None]:
        """Measure the net in here, after the last update of a pass that broke off, or of steps without a loader."""
        if not self.loaders:
            self.update()
            yield
            return
        if self.loaders[0].under_way is None:  # in the middle of a pass an update would change the training
            self.update()
        with self.loaders[0].measured():  # which may be what the net is measured with
            yield

    @collective("training.evaluate()")
    def evaluate(self, loader: Any, metric: Any) -> list[tuple[str, float]]:
        """``gp.evaluate`` over the batches of all processes, for a loader of :func:`prepare`; all must call it."""
        axis = self._parallel.batch_axis
        with self._measured():
            values = evaluate(self.net, loader, metric, self.devices, self.store, batch_axis=axis)
        self._reseed()  # an evaluation draws numbers too, where a net has dropout
        return values

    @collective("training.predict()")
    def predict(self, loader: Any) -> Any:
        """The net's outputs for all samples of a loader, in the order of its data set, on every process; all call it.

        Args:
            loader: one that :func:`prepare` returned, shuffled or not; one process takes any, in the order in which it
                yields. Its batches are ``(inputs, labels)``, whose labels are left out, ``(inputs,)``, or one array.

        Returns:
            What the net returns for a batch, an array or nested tuples, lists and dicts of them, as NumPy arrays
            (N, ...) with one row per sample of the data set, or with the samples along the training's `batch_axis`. The
            net runs in prediction mode.

        Raises:
            BatchMismatch: an output has no row per sample, or another shape in another batch; the loader leaves samples
                out (``last_batch="discard"``), or has none.
            TypeError: of several processes, each would read the whole loader.

        Example:
            >>> import mxnet as mx
            >>> import gluon_parallel as gp
            >>> net = mx.gluon.nn.Dense(1, in_units=1, weight_initializer="ones")
            >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
            >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd")
            >>> data = mx.gluon.data.ArrayDataset(mx.nd.arange(3).reshape((3, 1)), mx.nd.zeros(3))
            >>> test = mx.gluon.data.DataLoader(data, 2, shuffle=True)
            >>> training, test = gp.prepare(net, mx.gluon.loss.L2Loss(), trainer, test)
            >>> training.predict(test).tolist()
            [[0.0], [1.0], [2.0]]
        """
        arguments = self.net, loader, self.devices, self.store, self._parallel.batch_axis
        with self._measured():
            outputs = kvstore.together(self.store, lambda: predict(*arguments), loader)
        self._reseed()
        return outputs

    @collective("training.broadcast_object()")
    def broadcast_object(self, value: Any) -> Any:
        """Process 0's `value` on every process, see ``gp.broadcast_object``; all call it."""
        return broadcast_object(value, self.store)
