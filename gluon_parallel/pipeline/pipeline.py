"""One step of pipeline-parallel training: micro-batches flow through stages on several devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

from ..allreduce.gradients import trainable
from ..errors import GradientUnavailable
from ..kvstore.contract import contract
from ..loss_checks import check_loss as check_gradient
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested, as_tuple
from ..mxnet.device_threads import call_from
from ..mxnet.device_threads.seeds import draw_seed
from ..mxnet.trainers import loss_scaler_of, store_of, updaters_of
from ..nn.blocks import draws_random_numbers, net_and_loss
from ..sample_loss import check_reduction
from ..split import num_samples, shard_sizes, split_and_load
from ..step.checks import check_loss, check_update
from ..step.first_step import connect, make_parameters
from ..step.label_checks import label_check_of
from ..step.precision import refuse_16_bits_on_cpus
from ..step.training import Training
from ..step.training_step import Options, TrainingStep
from . import checks
from .flow import Flow, StepLoss
from .orders import launching_order
from .partition import Partition, partition
from .profile import Profile, peaks
from .stage import (
    Arrays,
    Recorder,
    Stage,
    accumulating,
    concatenate,
    cut,
    move_parameters,
    moved,
    outputs_of,
    pass_counts,
)


class Pipeline(Training):
    """Train a net that is cut into stages, each on a device of its own.

    :meth:`step` cuts the batch into micro-batches. While the second stage works on the first micro-batch, the first
    stage works on the second one. The gradient is that of the mean loss over all samples and the update comes after the
    last micro-batch, so a step equals one of the unsplit net with the whole batch, whatever the number of micro-batches
    and their sizes. BatchNorm is the exception: it takes the statistics of each micro-batch, and a warning says so.
    With :class:`gluon_parallel.nn.SyncBatchNorm` in its place a step is exact too. A stage with such a layer runs all
    micro-batches of its replica in one pass, so the stages beside it wait for it; stages without it, or where all of
    these layers have ``use_global_stats=True``, overlap.

    Stages are called as ``stage(*outputs of the stage before)``, so a stage may return a tuple: skip connections are
    passed along. The loss is called as ``loss(*outputs of the last stage, *labels)`` on the last device.

    Args:
        stages: list of Gluon blocks; or one ``Sequential``, which is cut by its parameters' bytes, or the result of
            :func:`gluon_parallel.pipeline.partition`, which can measure. They are initialised, on any device; the
            parameters move to their stage's device.
        devices: list of ``mx.Context``, one per stage. For replicas, a list of such lists: every replica trains on its
            share of the batch, and the gradients are summed.
        num_micro_batches: into how many parts each replica cuts its share. With S stages the devices are idle for about
            (S - 1) / (num_micro_batches + S - 1) of a step.
        order: ``"1f1b"`` (one forward pass, one backward pass) or ``"gpipe"`` (all forward passes first), in which a
            stage holds the activations of all micro-batches. With a loss of parts, and before a stage with
            SyncBatchNorm, it is always ``"gpipe"``: nothing can go backward before all micro-batches have gone forward.
        recompute: keep only the stages' inputs, and compute the activations again for the backward pass: about a third
            more work for less memory. Random numbers (dropout) are the same both times. Where a stage runs a pass
            forward and next backward, it keeps the activations: so does one with SyncBatchNorm, and a warning says so.
        reduction, batch_axis, accumulate, clip_global_norm, ignore_stale_grad: as of
            :class:`gluon_parallel.DataParallel`.

    Attributes:
        stages: list of blocks.
        net: the Sequential that was cut, or a block with the stages as children ``0``, ``1``, ...; for checkpoints:
            ``pipe.net.save_parameters(file)`` or ``gp.checkpoint.save(path, pipe.net, trainer)``.
        num_samples: of the last step, in this process.
        loss_scaling: of mixed precision, with `scale` and `num_skipped`; None before the first step.

    Raises:
        PipelineMismatch: stages, devices and micro-batches do not fit together, or two stages share a parameter.
        PrecisionUnsupported: float16 on a CPU, see :func:`gluon_parallel.set_precision`.
        ValueError: an argument makes no sense.

    Example:
        >>> net = mx.gluon.nn.HybridSequential()
        >>> net.add(mx.gluon.nn.Dense(8, in_units=3, activation="relu"), mx.gluon.nn.Dense(1, in_units=8))
        >>> net.initialize()
        >>> pipe = Pipeline(net, [mx.cpu(0), mx.cpu(1)], num_micro_batches=4)
        >>> trainer = mx.gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0.1})
        >>> loss = pipe.step(mx.gluon.loss.L2Loss(), trainer, mx.nd.ones((6, 3)), mx.nd.ones((6, 1)))
        >>> loss.shape, pipe.num_samples, pipe(mx.nd.ones((2, 3))).shape
        ((1,), 6, (2, 1))
    """

    def __init__(
        self,
        stages: mx.gluon.Block | list[mx.gluon.Block],
        devices: Sequence[mx.Context] | Sequence[Sequence[mx.Context]],
        num_micro_batches: int,
        order: str = "1f1b",
        recompute: bool = False,
        reduction: str | None = None,
        batch_axis: int = 0,
        accumulate: int = 1,
        clip_global_norm: float | None = None,
        ignore_stale_grad: bool = False,
    ) -> None:
        self.replicas = checks.replicas(devices)
        checks.check_arguments(num_micro_batches, order, recompute)
        if isinstance(stages, mx.gluon.Block):
            stages = partition(stages, len(self.replicas[0]))
        checks.check_stages(stages, self.replicas)
        self.stages = list(stages)
        net = stages.net if isinstance(stages, Partition) else _Stages(self.stages)
        check_update(accumulate, clip_global_norm)
        check_reduction(reduction)
        self.net, self._reduction = net, reduction
        self._options = Options(accumulate, clip_global_norm, ignore_stale_grad)
        self._devices = [device for replica in self.replicas for device in replica]
        refuse_16_bits_on_cpus(self.net, self._devices)
        self.num_micro_batches, self.order, self.recompute = num_micro_batches, order, recompute
        self.batch_axis = batch_axis
        self._trainer: mx.gluon.Trainer | None = None
        self._loss: Any = None  # of the step
        self._parts: tuple[str, ...] = ()  # of that loss
        self._has_checked_loss = False
        self._recorders: list[Recorder] = []  # one for each replica, in a step that is profiled
        self._move_parameters()

    def __repr__(self) -> str:
        return f"Pipeline({len(self.stages)} stages on {self.replicas}, {self.num_micro_batches} micro-batches)"

    def collect_params(self) -> mx.gluon.ParameterDict:
        """The parameters of all stages, for one ``gluon.Trainer``.

        The trainer's store and ``update_on_kvstore`` are treated as :class:`gluon_parallel.DataParallel` does.
        """
        self._move_parameters()
        return self.net.collect_params()

    def step(
        self, loss: Callable[..., Nested], trainer: mx.gluon.Trainer, x: Nested | None, y: Nested = ()
    ) -> mx.nd.NDArray:
        """Train on one batch.

        Args:
            loss: a Gluon loss or any function of the last stage's outputs and the labels.
            trainer: the ``gluon.Trainer`` of :meth:`collect_params`; step through the pipeline alone.
            x: the first stage's input, or a tuple or list of inputs, which are arrays. None if this process has run out
                of batches while others have not.
            y: the label, or a tuple or list of labels; ``()`` if the loss needs none.

        Returns:
            The mean loss over the batch of this process, of shape (1,), on the last device of the first replica. It is
            not waited for.

        Raises:
            BatchMismatch: there are fewer samples than micro-batches, or none; inputs and labels differ in length; the
                loss cannot take the outputs and labels, has another length than its micro-batch, or is a single value
                and there is no `reduction`; a label of this or an earlier step is no class of the outputs.
            PipelineMismatch: a stage cannot take its input, or has reduced the batch where micro-batches are
                concatenated.
            GradientUnavailable: called while MXNet records, or the trainer is not of this pipeline.
        """
        self._take(loss, trainer)
        self._loss, self._label_check = loss, label_check_of(loss, self.batch_axis, self._label_check)
        assert self._step is not None
        return self._step(x, y, self.replicas[0][-1], self._micro_batches, self._prepare, self._run)

    def profile(
        self, loss: Callable[..., Nested], trainer: mx.gluon.Trainer, x: Nested | None, y: Nested = ()
    ) -> Profile | Any:  # None in a process without samples
        """Train on one batch like :meth:`step`, and measure it; waits. MXNet's profiler, which it uses, must not be on.

        The first step of a pipeline takes longer than the later ones, so profile a later one.

        Args:
            loss, trainer, x, y: as of :meth:`step`.

        Returns:
            None in a process without samples; else a :class:`gluon_parallel.pipeline.Profile`: print it to see what the
            stages take, and what other numbers of micro-batches would; ``profile.draw(path)`` makes a picture.
        """
        self._recorders = recorders = [Recorder() for _ in self.replicas]
        try:
            most = peaks(self._devices, lambda: self.step(loss, trainer, x, y))
        finally:
            self._recorders = []
        if self.num_samples == 0:
            return None
        return Profile(self.stages, self._order(), self.recompute, self.num_micro_batches, recorders, most)

    def __call__(self, *x: mx.nd.NDArray) -> mx.nd.NDArray | Arrays:
        """The forward pass of the whole net.

        Args:
            x: the first stage's inputs.

        Returns:
            What the last stage returns for the whole batch, on the last device of the first replica.
        """
        if mx.autograd.is_recording():
            raise GradientUnavailable(
                "the stages of a pipeline have a graph each, so that nothing can go backward from what it returns; "
                "train with pipe.step(loss, trainer, x, y), and call the pipeline outside of autograd.record()"
            )
        num = num_samples(x, self.batch_axis)
        checks.check_batch(x, num, 1, 1)
        parts = []
        count = min(num, self.num_micro_batches * len(self.replicas))
        devices = [self.replicas[number % len(self.replicas)][0] for number in range(count)]
        micro_batches = split_and_load(x, devices, self.batch_axis)
        self._finish_initialization(micro_batches[0])
        flows = [self._stages_of(number) for number in range(len(self.replicas))]
        for number, arrays in enumerate(micro_batches):
            arrays = tuple(array.copy() for array in arrays)
            for stage in flows[number % len(flows)]:
                outputs, arrays = call_from(stage.device, stage.infer, arrays)
            if count > 1:
                checks.check_samples(len(flows[0]) - 1, outputs, shard_sizes(num, count)[number], self.batch_axis, True)
            parts.append(moved(outputs, self.replicas[0][-1]))
        outputs = concatenate(parts, self.batch_axis)
        return outputs if len(outputs) > 1 else outputs[0]

    def _move_parameters(self) -> None:
        for number, block in enumerate(self.stages):
            move_parameters(block.collect_params().values(), number, self.replicas, self)

    def _stages_of(self, replica: int) -> list[Stage]:
        recorder = self._recorders[replica] if self._recorders else None
        return [Stage(number, self.stages, self.replicas[replica], recorder) for number in range(len(self.stages))]

    def _finish_initialization(self, x: Arrays) -> None:

        def run(arrays: Arrays = x) -> None:
            for number, device in enumerate(self.replicas[0]):
                arrays = outputs_of(self.stages, number, moved(arrays, device))

        make_parameters(list(self.net.collect_params().values()), run)
        self._move_parameters()

    def _order(self) -> str:
        return "gpipe" if self._parts else self.order  # the counts of all micro-batches come first

    def _take(self, loss: Callable[..., Nested], trainer: mx.gluon.Trainer) -> None:
        """Prepare a trainer, or a loss of other parts, that the last step did not have."""
        parts = tuple(getattr(loss, "parts", ()))
        if trainer is not None and trainer is self._trainer and parts == self._parts:
            return
        check_loss(loss, self._options.accumulate, self._reduction)
        checks.check_trainer(self.net, trainer)
        store = connect(self.net, trainer, self._devices, None, True)
        for updater in updaters_of(trainer):
            updater.aggregate_updates = False  # one operator for several weights would need them on one device
        self._trainer, self._parts, self._has_checked_loss = trainer, parts, False
        blocks = net_and_loss(self.net, loss)
        self._step = TrainingStep(blocks, trainer, store, parts, self.batch_axis, self._options)

    def _micro_batches(self, batch: tuple[tuple, tuple], num: int) -> tuple[list[Arrays], list[tuple]]:
        """The inputs and the labels of each replica, on its first and its last device."""
        inputs, labels = batch
        checks.check_batch(inputs, num, self.num_micro_batches, len(self.replicas))
        shards = split_and_load(inputs, [devices[0] for devices in self.replicas], self.batch_axis)
        if not labels:
            return shards, [()] * len(shards)
        return shards, split_and_load(labels, [devices[-1] for devices in self.replicas], self.batch_axis)

    def _prepare(self, shards: tuple[list[Arrays], list[tuple]] | None, starts: bool) -> None:
        if starts:
            assert self._step is not None
            inputs = shards and shards[0][0]
            if inputs:
                self._finish_initialization(cut(inputs, 0, 1, self.batch_axis))
            num_parts = self.num_micro_batches * len(self.replicas)
            run = (lambda: None) if inputs else None  # the stages' shapes are known by now
            self._step.start(run, inputs, num_parts, checks.OF_MICRO_BATCHES)
            if self.recompute and contract(store_of(self._trainer)).rank == 0:
                checks.warn_of_recomputation(pass_counts(self.stages, self.num_micro_batches), self.num_micro_batches)
        self._move_parameters()

    def _run(self, shards: tuple[list[Arrays], list[tuple]], num: int) -> mx.nd.NDArray:
        assert self._trainer is not None and self._step is not None
        count, order = self.num_micro_batches, self._order()
        counts = pass_counts(self.stages, count)
        seed = draw_seed() if self.recompute and any(map(draws_random_numbers, self.stages)) else None
        look = self._look if self._label_check is not None else None
        step_loss = StepLoss(self._loss, self._reduction, self._step.sums, self._step.loss_scaling.scale, look)
        flows = []
        with mx.autograd.train_mode(), accumulating(trainable(self._trainer)):
            sizes_of_replicas = shard_sizes(num, len(self.replicas))
            for number, size in enumerate(sizes_of_replicas):
                stages = self._stages_of(number)
                inputs, labels = (of_replicas[number] for of_replicas in shards)
                sizes = shard_sizes(size, count)
                begin = sum(sizes_of_replicas[:number])
                flows.append(Flow(stages, inputs, labels, begin, sizes, counts, order, step_loss, self.batch_axis))
                if self.recompute:
                    flows[-1].recompute(seed)
            for task in launching_order(order, counts):
                for flow in flows:
                    flow.launch(task)
        mean = step_loss.mean()
        if not self._has_checked_loss and step_loss.first is not None:
            scaled = loss_scaler_of(self._trainer) is not None
            checked = self._loss, *step_loss.first, self._reduction, len(self._parts), scaled, self.batch_axis
            call_from(self.replicas[0][-1], check_gradient, *checked)
            self._has_checked_loss = True
        return mean

    def _look(self, outputs: Arrays, labels: tuple, begin: int) -> None:
        """Look at the labels of the samples of the batch from `begin` on."""
        assert self._step is not None
        if self._label_check is not None and len(labels) == 1:
            number, waits = self._step.number, not self._has_checked_loss
            self._label_check.look(outputs[0], labels[0], number, begin, waits)


class _Stages(mx.gluon.Block):
    """The stages of a pipeline as one net, with the names of parameters that a Sequential of them has."""

    def __init__(self, stages: Sequence[mx.gluon.Block]) -> None:
        super().__init__(prefix="")
        for number, block in enumerate(stages):
            self.register_child(block, str(number))

    def forward(self, *x: mx.nd.NDArray) -> mx.nd.NDArray | Arrays:
        for block in self._children.values():
            x = as_tuple(block(*x))
        return x if len(x) > 1 else x[0]
