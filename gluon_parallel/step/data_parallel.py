"""``DataParallel``: cuts a batch over the devices, and runs net and loss on each; `training_step` makes the step."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable
from typing import Any, Callable

from ..allreduce import written
from ..allreduce.gradients import trainable
from ..kvstore.contract import contract
from ..loss_checks import check_loss
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested, as_tuple
from ..mxnet.device_threads.thread import acting_as, call_from
from ..mxnet.parameters import gradient_storage, waits_for_shape
from ..mxnet.trainers import LOSS_SCALER, check_devices, store_of
from ..nn import convert_by_default, participants, say_what_was_converted
from ..nn.blocks import net_and_loss
from ..nn.sync_batch_norm.participants import restart_if_needed, sync_groups_of
from ..nn.sync_batch_norm.sync_group import SyncGroup
from ..reduce.shards import shard
from ..sample_loss import backward_per_sample, check_reduction
from ..split import as_devices, cut, map_arrays, shard_sizes
from . import checks, first_step
from .custom_split import check_shards
from .label_checks import label_check_of
from .loss_over_batch import LossOverBatch, check_options
from .losses import backward_of_parts
from .training import Training
from .training_step import NAMES, Options, TrainingStep

_DETACHED = operator.methodcaller("detach")  # an array without its graph
_STEP = "a step"  # in the place of a device: calls within a step are in the right thread, none is handed over


class DataParallel(Training):
    """Train `net` on several devices as if they were one with the whole batch.

    One call of :meth:`step` cuts the batch over the devices, runs net and loss forward and backward on every device,
    sums the gradients over devices and processes, and updates every copy of the parameters alike. The gradient is that
    of the mean loss over all samples, whatever the sizes of the shards: N devices make one step on the N-fold batch.

    The loss is called as ``loss(*outputs, *labels)`` on every device and returns either one value per sample, first
    axis first (what Gluon's losses do; further axes are summed, as ``loss.backward()`` would), or, with `reduction`, a
    single value. One that is not of Gluon's is called once more in the first step, in predict mode, to be checked.

    A loss whose value is no mean over samples has an attribute `parts`, the names of its parts, and returns a pair
    (sum, count) for each: two arrays of one value. Each sum is divided by its count, both over all devices of all
    processes, and the parts are added up. The counts may depend on the forward pass (how many proposals were sampled);
    nobody waits for them. There is no accumulation then.

    Labels of ``SoftmaxCrossEntropyLoss``, ``gp.models.PixelLoss`` and GluonCV's segmentation losses must be classes of
    the net's outputs: others end the training in their step, or soon after it if they were not ready then. The labels
    of a loss of your own are checked if it has an attribute `class_axis`, the axis of the first output that counts
    classes; with an attribute `ignored_label`, that label is left out.

    Args:
        net: a Gluon block, initialised on all `devices`.
        loss: a Gluon loss or any function of outputs and labels.
        trainer: the ``gluon.Trainer`` of the net's parameters. It stays the owner of the optimizer, its learning rate
            and its state. The update runs on the devices (``update_on_kvstore=False``), because only there gradients
            can be clipped and states be saved. In the place of the stores ``"device"`` and ``"local"`` gradients are
            summed by NCCL, between several GPUs if MXNet has it and they are float32 or float64, or by
            :func:`allreduce`; ``trainer.step`` does so, too, from then on.
        devices: list of ``mx.Context``, or one; by default those on which the trainer's parameters are.
        accumulate: add the gradients of so many calls of :meth:`step` before an update; equal to one batch that is
            so many times larger. The parameters' ``grad_req`` becomes ``"add"``.
        clip_global_norm: scale the gradient of the mean loss, all parameters together, down to this norm. It is
            applied after the sum over the devices, and does not wait.
        batch_axis: the axis of inputs and labels that counts samples.
        ignore_stale_grad: leave out parameters that the loss reached on no device of any process, which the processes
            tell each other at every update; otherwise GradientUnavailable names them.
        convert_for_cpu: on CPUs, train a hybridized net as after ``gp.nn.convert_for_cpu(net)``: faster, with the same
            values up to rounding and the same files. ``GLUON_PARALLEL_CONVERT_FOR_CPU=0`` in the environment forbids
            it, too.
        communication_hook: what sums the gradients over the processes, over the store ``mpi``: one of
            ``gp.communication_hooks``, such as ``PowerSGD(rank=4)`` or ``float16``, or a function of your own. It is
            called as ``hook(bucket, store)`` with a :class:`GradientBucket` and a :class:`BucketStore`, and returns an
            NDArray for each gradient of the bucket, the same on all processes. None: exact sums.
        reduction: ``"mean"`` or ``"sum"``, for a loss that returns a single value per device: the mean (in which every
            sample counts the same) or the sum over that device's samples. None for one value per sample; a single
            value is then refused, because it might be either.
        shard_optimizer: keep on every device of every process only its part of the optimizer's state, and update only
            that part of the weights, which all others then get (ZeRO stage 1, PyTorch's ``ZeroRedundancyOptimizer``).
            The weights are the same. After a step, only the part of a gradient that a process owns is defined there.
            Over the store ``mpi``, and over the devices of one process; see ``docs/howto/memory.md``.
        split: ``split(data, devices)`` returns at most one shard per device, each nested like `data`, which together
            have every sample once; by default :func:`split_and_load` along `batch_axis`. The gradient is the same
            whatever goes where.
        loss_over: ``"batch"`` for a loss that looks at other samples of the batch, such as a contrastive one: outputs
            and labels of all devices and processes are gathered, and it is called once with those of the whole batch,
            in its order, on one device of each process. Every output has one row per sample. It returns a single value,
            which is the loss (the weights are those of ``loss.backward(); trainer.step(1)`` on one device), or one per
            sample, whose mean is; ``reduction="sum"`` divides a single value by the number of samples. Its parameters,
            such as a temperature, count once. ``step`` returns the mean loss over all processes. There is no
            accumulation, and there are no `parts`. ``"shard"``: it is called on each device with its samples.

    Attributes:
        num_samples: of the last step, in this process.
        accumulate: as given.
        loss_scaling: the loss scale of mixed precision, see :class:`LossScaling`.
        mean: what the last step returned or, if its update has failed, would have returned.
        outputs: what the net returned in the last step, a list with one entry for each device that had samples, in the
            order of ``split_and_load``: ``metric.update(gp.split_and_load(labels, devices), parallel.outputs)`` counts
            the accuracy in training. Not waited for, and kept until the next step.

    Raises:
        ValueError: an argument makes no sense.
        PrecisionUnsupported: MXNet cannot train this net in its number types on these devices.
        GradientUnavailable: the trainer is set to update on its store; a parameter is not on all devices, or is
            row_sparse where that cannot work.

    Example:
        >>> import mxnet as mx
        >>> net = mx.gluon.nn.Dense(1, in_units=3)
        >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        >>> parallel = DataParallel(net, mx.gluon.loss.L2Loss(), trainer)
        >>> loss = parallel.step(mx.nd.ones((5, 3)), mx.nd.ones((5, 1)))
        >>> loss.shape, parallel.num_samples
        ((1,), 5)
    """

    def __init__(
        self,
        net: mx.gluon.Block,
        loss: Callable[..., Nested],
        trainer: mx.gluon.Trainer,
        devices: Iterable[mx.Context] | mx.Context | None = None,
        accumulate: int = 1,
        clip_global_norm: float | None = None,
        batch_axis: int = 0,
        ignore_stale_grad: bool = False,
        split: Callable[[Nested, list[mx.Context]], list[Nested]] | None = None,
        reduction: str | None = None,
        convert_for_cpu: bool = True,
        shard_optimizer: bool = False,
        communication_hook: Any = None,
        loss_over: str = "shard",
    ) -> None:
        checks.check_trainer(net, trainer, "(net, loss, trainer)")
        checks.check_update(accumulate, clip_global_norm)
        check_reduction(reduction)
        checks.check_loss(loss, accumulate, reduction)
        check_options(loss, loss_over, accumulate)
        self.net, self.loss, self.trainer, self._blocks = net, loss, trainer, net_and_loss(net, loss)
        self.devices = as_devices(check_devices(trainer) if devices is None else devices)
        self.batch_axis, self.accumulate = batch_axis, int(accumulate)
        self._compares_batches = True
        self._sync_groups: list[SyncGroup] | None = None  # of the net's layers; None: not known, or on other devices
        self.outputs: list[Nested] = []
        self._split, self._reduction, self._parts = split, reduction, getattr(loss, "parts", ())
        self._is_over_batch = loss_over == "batch"
        self._go_backward: Callable[..., mx.nd.NDArray] = functools.partial(backward_per_sample, reduction=reduction)
        self._labels: list[tuple[tuple, int]] | None = None  # of the last step, see `keep_labels`
        checks.check_devices(trainer, self.devices)
        self._num_written = written.num
        store = first_step.connect(net, trainer, self.devices, communication_hook, accumulate > 1)
        self._step: TrainingStep = TrainingStep(
            self._blocks, trainer, store, self._parts, batch_axis,
            Options(self.accumulate, clip_global_norm, ignore_stale_grad),
        )  # fmt: skip
        self._label_check = None if self._is_over_batch else label_check_of(loss, batch_axis)
        self._converts, self._is_converted, self._has_run = convert_for_cpu, False, False
        if shard_optimizer and checks.can_shard(trainer, store):
            shard(trainer)

    def __repr__(self) -> str:
        return f"DataParallel({type(self.net).__name__} on {self.devices})"

    def step(self, x: Nested | None, y: Nested = ()) -> mx.nd.NDArray:
        """Train on one batch.

        Args:
            x: the net's input, or a tuple or list of inputs. Each may itself be nested. None if this process has run
                out of batches while others have not: it takes part with zero samples (see ``gp.sampler.join``). So it
                does with an empty share of a batch that has fewer samples than there are processes.
            y: the label, or a tuple or list of labels; ``()`` if the loss needs none.

        Returns:
            The mean loss over the batch, an NDArray of shape (1,) on the first device. It is not waited for: reading
            it (``asnumpy``) waits for this step's forward pass. In several processes it is that of this process's part
            of the batch (of a loss with `parts` that of all); a run's log has the mean over all.

        After an update, ``parameter.grad(device)`` is on every device the gradient of the sum of the losses over the
        samples of all devices and processes, and of the steps that `accumulate` adds up (of a loss with `parts`, of the
        loss): the update divides by their number. With `clip_global_norm` it is the clipped one; :attr:`gradient_norm`
        is the norm before, of the mean loss.

        Raises:
            BatchMismatch: the batch is empty or None and no other process has samples, inputs and labels differ in
                length, `split` has lost or added samples, the loss has another length than its shard, or it is a single
                value and there is no `reduction`; a label of this or an earlier step is no class of the outputs; in
                the first step, the loss divides by the samples of its own device.
            GradientUnavailable: called while MXNet records: a step records by itself; the loss did not reach a
                parameter.
            WorkersDiffer: processes have different learning rates; nothing has been updated then.
            NotFinite: a weight is NaN or infinite since one of the 17 updates before; names the parameter and the
                steps. The weights are read in the background, after updates 1, 2, 4, 8 and every 8th.
        """
        with acting_as(_STEP):
            self.outputs = []
            if self._labels:
                self._labels = []
            return self._step(x, y, self.devices[0], self._shards, self._prepare, self._run)

    __call__ = step

    def _shards(self, batch: tuple[tuple, tuple], num: int) -> tuple[list, list[int], list[mx.Context]]:
        """Shards, how many samples each has, and its device."""
        if self._split is None:
            sizes = shard_sizes(num, len(self.devices))
            return cut(batch, sizes, self.devices, self.batch_axis), sizes, self.devices[: len(sizes)]
        shards = self._split(batch, self.devices)
        return check_shards(shards, num, self.devices, self.batch_axis, NAMES)

    def _prepare(self, shards: tuple[list, list[int], list[mx.Context]] | None, starts: bool) -> None:
        if self._num_written != written.num:  # parameters may have been moved
            checks.check_devices(self.trainer, self.devices)
            self._num_written = written.num
        if starts:
            if self._converts:  # before the net runs: a resumed run repeats its steps bit for bit
                self._is_converted = convert_by_default(self.net, self.devices)
            first = shards[0][0] if shards else None
            compared = first if self._compares_batches else None
            run = None if first is None else lambda: self._show_shapes(*first)
            self._step.start(run, compared, len(self.devices), checks.OF_SHARDS)
            if self._step.sums is not None:
                self._go_backward = functools.partial(backward_of_parts, parts=self._step.sums)
            if self._is_over_batch:
                loss = functools.partial(getattr, weakref.proxy(self), "loss")  # with a net in no circle of references
                self._step.over_batch = LossOverBatch(
                    loss, self._reduction, self._blocks, self.trainer, self.batch_axis
                )
                self._go_backward = self._step.over_batch.backward
        if self.accumulate > 1:
            for parameter in trainable(self.trainer):  # in every step: one that was frozen comes back with "write"
                if gradient_storage(parameter) == "default":  # MXNet adds to no others; the update does
                    parameter.grad_req = "add"

    def _show_shapes(self, inputs: tuple, labels: tuple) -> None:
        """Run the net once, and the loss if it has layers that wait for their shapes."""
        outputs = self.net(*inputs)
        if any(waits_for_shape(parameter) for parameter in self._blocks.collect_params().values()):
            self.loss(*as_tuple(outputs), *labels)

    def _run(self, cut_batch: tuple[list, list[int], list[mx.Context]], num: int) -> mx.nd.NDArray:
        shards, sizes, devices = cut_batch
        returned: dict[int, Nested] = {}
        run = functools.partial(self._call, returned, sizes)
        scaler = getattr(self.trainer, LOSS_SCALER, None)  # of MXNet's mixed precision
        scale = 1.0 if scaler is None else self.loss_scaling.scale
        if self._sync_groups is None or len(devices) < len(self.devices):
            with participants(self._blocks, devices):  # layers do not wait for other devices, which have no samples
                mean = self._go_backward(run, shards, sizes, devices, scale)
        else:
            if self._sync_groups:
                restart_if_needed(self._sync_groups)
            mean = self._go_backward(run, shards, sizes, devices, scale)
        if self._is_converted and contract(store_of(self.trainer)).rank == 0:  # once, not once per process
            say_what_was_converted(self.net)
        if not self._has_run:  # the first step with samples
            groups = sync_groups_of(self._blocks)  # those of a graph are known once it has run
            names = frozenset(map(str, self.devices))
            self._sync_groups = groups if all(group.devices() == names for group in groups) else None
            if not self._is_over_batch:  # which is checked with the whole batch
                inputs, labels = shards[0]
                checked = self.loss, as_tuple(returned[id(inputs)]), labels, sizes[0], self._reduction
                call_from(devices[0], check_loss, *checked, len(self._parts), scaler is not None, self.batch_axis)
        self._is_converted, self._has_run = False, True
        self.outputs = [returned[id(inputs)] for inputs, _ in shards]
        if self._labels is not None:
            self._labels = [(labels, size) for (_, labels), size in zip(shards, sizes)]
        return mean

    def _call(self, returned: dict[int, Nested], sizes: list[int], inputs: tuple, labels: tuple) -> Nested:
        """The loss of the next shard, or what it is called with where it is over the whole batch.

        What the net has returned is noted in `returned`, by the identity of `inputs`.
        """
        try:
            outputs = self.net(*inputs)
            begin = sum(sizes[: len(returned)])  # the index in the batch of its first sample
            returned[id(inputs)] = map_arrays(_DETACHED, outputs)
            outputs = as_tuple(outputs)
            if self._is_over_batch:
                return outputs, labels
            check = self._label_check
            if check is not None and len(labels) == 1:  # a weight for each sample may leave labels out
                looked = outputs[0], labels[0], self._step.number, begin
                if not self._has_run:
                    check.look(*looked, waits=True)
                elif found := check.find(outputs[0].handle.value, labels[0].handle.value, self._step.number, begin):
                    check.act(found, *looked)
            return self.loss(*outputs, *labels)
        except (TypeError, mx.base.MXNetError) as error:
            error.args = (f"{error} {checks.call_in_words(inputs, labels, error)}",)
            raise


def keep_labels(parallel: DataParallel) -> None:
    """Have :func:`labels_of` know the labels of each step from now on."""
    parallel._labels = []


def labels_of(parallel: DataParallel) -> list[tuple[tuple, int]]:
    """The labels of the last step and how many samples they are of, for each device that had some, as `outputs`."""
    return parallel._labels or []


def expect_equal_batches(parallel: DataParallel) -> None:
    """Do not warn if the first batch is the same on all processes: of equal samples, equal batches are made."""
    parallel._compares_batches = False
