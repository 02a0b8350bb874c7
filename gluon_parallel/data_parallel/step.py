"""The step itself: who has samples, whose gradients are summed, and when there is an update."""

from typing import Any

import numpy as np

from .. import kvstore
from ..allreduce import allreduce_each, broadcast
from ..compat import mx
from ..compat.array_types import as_legacy, set_zero
from ..engine import make_plain
from ..errors import GradientUnavailable
from ..kvstore.reserved_keys import SAMPLE_COUNT
from ..nn import absent, participants, suggest_for_cpu
from ..split import is_empty, num_samples, split_and_load
from . import checks
from .background_sum import BackgroundSum
from .losses import LossOfParts, LossPerSample
from .precision import LossScaling, refuse_unsupported
from .weights_comparison import WeightsComparison

nd = mx.nd

# These would update every device differently: SGLD draws new noise for each, and the others keep state that all devices
# share and each call advances (Nadam's momentum schedule, LARS's last learning rate, LBSGD's sum of gradients).
_ONE_UPDATE_FOR_ALL = (mx.optimizer.SGLD, mx.optimizer.Nadam, mx.optimizer.LARS, mx.optimizer.LBSGD)


def _as_tuple(data):
    return tuple(data) if isinstance(data, (list, tuple)) else (data,)


class DataParallel:
    """Train `net` on several devices as if they were one with the whole batch.

    One call of :meth:`step` cuts the batch over the devices, runs net and loss on every device, runs one joint
    backward pass, sums the gradients over the devices, and updates every copy of the parameters alike. The gradient
    is that of the mean loss over all samples of the batch, whatever the sizes of the shards: one step over N devices
    is one step on the N-fold batch.

    The loss is called as ``loss(*outputs, *labels)`` on every device and returns either one value per sample, first
    axis first (what Gluon's losses do; further axes are summed, as ``loss.backward()`` would), or, with `reduction`, a
    single value.

    A loss whose value is no mean over samples has an attribute `parts`, the names of its parts, and returns a pair
    (sum, count) for each: two arrays of one value. Each sum is divided by its count, both over all devices of all
    processes, and the parts are added up. The counts may depend on the forward pass (how many proposals were sampled);
    nobody waits for them. There is no accumulation then.

    Args:
        net: a Gluon block, initialised on all `devices`.
        loss: a Gluon loss or any function of outputs and labels.
        trainer: the ``gluon.Trainer`` of the net's parameters. It stays the owner of the optimizer, its learning rate
            and its state. The update runs on the devices (``update_on_kvstore=False``), because only there gradients
            can be clipped and states be saved; and :func:`allreduce` does the work of the stores ``"device"`` and
            ``"local"``. From then on step through this object alone: ``trainer.step`` would sum over no devices.
        devices: list of ``mx.Context``; by default those on which the trainer's parameters are.
        accumulate: add the gradients of so many calls of :meth:`step` before an update; equal to one batch that is
            so many times larger. The parameters' ``grad_req`` becomes ``"add"``.
        clip_global_norm: scale the gradient of the mean loss, all parameters together, down to this norm. It is
            applied after the sum over the devices, and does not wait.
        batch_axis: the axis of inputs and labels that counts samples.
        ignore_stale_grad: leave out parameters that the loss did not reach; otherwise the trainer raises for them.
        reduction: ``"mean"`` or ``"sum"``, for a loss that returns a single value per device: the mean (in which every
            sample counts the same) or the sum over that device's samples. None for one value per sample; a single
            value for several samples is then refused, because it might be either.
        split: ``split(data, devices)`` returns at most one shard per device, each nested like `data`; by default
            :func:`split_and_load` along `batch_axis`. The gradient is the same whatever goes where.

    Attributes:
        num_samples: of the last step, in this process.
        loss_scaling: the loss scale of mixed precision, see :class:`LossScaling`.

    Raises:
        ValueError: an argument makes no sense.
        PrecisionUnsupported: MXNet cannot train this net in its number types on these devices.
        GradientUnavailable: the trainer is set to update on its store; a parameter is not on all devices, or is
            row_sparse where that cannot work.

    Example:
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
        net,
        loss,
        trainer,
        devices=None,
        accumulate=1,
        clip_global_norm=None,
        batch_axis=0,
        ignore_stale_grad=False,
        split=None,
        reduction=None,
    ):
        checks.check_arguments(loss, trainer, devices, accumulate, clip_global_norm, reduction)
        self.net = net
        self.loss = loss
        self.trainer = trainer
        self.devices = list(devices) if devices is not None else list(trainer._check_contexts())
        self.accumulate = int(accumulate)
        self.clip_global_norm = clip_global_norm
        self.batch_axis = batch_axis
        self.ignore_stale_grad = ignore_stale_grad
        self._split = split if split is not None else lambda data, devices: split_and_load(data, devices, batch_axis)
        self.num_samples = 0
        names = getattr(loss, "parts", ())
        self._losses = LossOfParts(names) if names else LossPerSample(reduction)
        self._accumulated_samples = 0
        self._accumulated_steps = 0
        self._weights_are_shared = False
        self._has_suggested = False
        self._tally = BackgroundSum(SAMPLE_COUNT)
        self._counted: Any = None  # the array that becomes the number of samples of all processes
        self._agreement = WeightsComparison(net, trainer)
        self._reached_before: set = set()
        checks.check_trainer(net, trainer)
        checks.check_devices(trainer, self.devices)
        checks.refuse_sparse(trainer, accumulates=self.accumulate > 1, clips=clip_global_norm is not None)
        checks.refuse_compression(trainer)
        self._update_locally()
        self.loss_scaling = LossScaling(trainer)
        refuse_unsupported(net, trainer, self.devices)
        if self.accumulate > 1:
            for parameter in self._trainable():
                parameter.grad_req = "add"

    @property
    def parts(self):
        """Of the last step, the value of each part of a loss that has some, over all processes.

        {name: array of one value}; reading them waits for that step's forward pass.
        """
        return self._losses.parts

    def __repr__(self):
        return f"DataParallel({type(self.net).__name__} on {self.devices})"

    def _trainable(self):
        return checks.trainable(self.trainer)

    def _update_locally(self):
        """Have the trainer update on the devices, which MXNet decides at its first step and otherwise on the store."""
        trainer = self.trainer
        wanted = trainer._kvstore_params["update_on_kvstore"]
        if trainer._update_on_kvstore if trainer._kv_initialized else wanted:
            raise GradientUnavailable(
                "the trainer updates on its store, so gradients can neither be clipped nor weighted exactly; "
                "write gluon.Trainer(..., update_on_kvstore=False), or build DataParallel before the trainer's "
                "first step and before its state is saved or restored"
            )
        trainer._kvstore_params["update_on_kvstore"] = False
        store = trainer._kvstore_params["kvstore"]
        if trainer._kv_initialized:
            return
        if isinstance(store, str) and store.lower().startswith(("auto", "mpi", "horovod", "dist")):
            store = trainer._kvstore_params["kvstore"] = kvstore.create(store)  # the first step may have no samples
        if getattr(store, "type", store) in ("device", "local"):
            trainer._kvstore_params["kvstore"] = None  # `allreduce` does their work, in place of copies in a store

    def step(self, x, y=()):
        """Train on one batch.

        Args:
            x: the net's input, or a tuple or list of inputs. Each may itself be nested. None if this process has run
                out of batches while others have not: it takes part with zero samples (see ``gp.sampler.join``). So it
                does with an empty share of a batch that has fewer samples than there are processes.
            y: the label, or a tuple or list of labels; ``()`` if the loss needs none.

        Returns:
            The mean loss over the batch, an NDArray of shape (1,) on the first device. It is not waited for: reading
            it (``asnumpy``) waits for this step's forward pass.

        Raises:
            BatchMismatch: the batch is empty or None and there are no other processes, inputs and labels differ in
                length, the loss has another length than its shard, or it is a single value and there is no `reduction`.
                Nothing has been updated then.
            GradientUnavailable: called while MXNet records: a step records by itself.
        """
        if mx.autograd.is_recording():
            raise GradientUnavailable(
                "this step runs inside `with autograd.record():`, but it records, and goes backward, by itself; "
                "take it out of that block"
            )
        if x is None:
            checks.check_others(self._has_company())
            return self._step_without_samples()
        inputs, labels = _as_tuple(x), _as_tuple(y)
        if self._has_company() and is_empty({"x": inputs, "y": labels}, self.batch_axis):
            return self._step_without_samples()
        num = num_samples({"x": inputs, "y": labels}, self.batch_axis)
        shards = self._split((inputs, labels), self.devices)
        if not self._weights_are_shared:
            self._share_weights(shards[0])
        if self._accumulated_steps == 0:
            self._forget_gradients()
        self._count(num)
        sizes = [num_samples({"x": shard[0], "y": shard[1]}, self.batch_axis) for shard in shards]
        try:
            with participants(self.net, self.devices[: len(shards)]):  # layers do not wait for devices without samples
                scale = self.loss_scaling.scale
                mean = self._losses.backward(self._run, shards, sizes, self.trainer._kvstore, scale)
            self.num_samples = num
            self._accumulated_samples += num
            self._accumulated_steps += 1
        except BaseException:  # Ctrl-C too: half a batch must not leak into the next update
            self._accumulated_samples = self._accumulated_steps = 0
            self._counted = None
            raise
        if not self._has_suggested:
            self._has_suggested = True
            suggest_for_cpu(self.net, self.devices)
        if self._accumulated_steps == self.accumulate:
            self.update()
        return mean

    __call__ = step

    def _has_company(self):
        """Whether there are other processes."""
        trainer = self.trainer
        store = trainer._kvstore if trainer._kv_initialized else trainer._kvstore_params["kvstore"]
        return getattr(store, "num_workers", 1) > 1

    def _run(self, inputs, labels):
        try:
            return self.loss(*_as_tuple(self.net(*inputs)), *labels)
        except TypeError as error:
            raise checks.explained(error, len(inputs), len(labels)) from error

    def _step_without_samples(self):
        """Take part in the others' step: their layers meet this process too, and its gradients are zero."""
        if not self._weights_are_shared:
            self._share_weights(None)
        if self._accumulated_steps == 0:
            self._forget_gradients()
        self._count(0)
        absent(self.net, self._losses.meet_without_samples(self.trainer._kvstore, self.devices[0]))
        for parameter in self._trainable():
            if self.ignore_stale_grad and parameter.name not in self._reached_before:
                continue
            for array, gradient in zip(parameter.list_data(), parameter.list_grad()):
                if parameter.grad_req == "write":
                    set_zero(gradient)
                array._fresh_grad = True
        self.num_samples = 0
        self._accumulated_steps += 1
        if self._accumulated_steps == self.accumulate:
            self.update()
        return self._losses.without_samples(self.devices[0])

    def _count(self, num):
        """With the last batch before an update, tell the other processes how many samples there were.

        Early, so that the number is back before the gradients are: nobody waits for it then.
        """
        if self._accumulated_steps + 1 == self.accumulate:
            self._send_count(self._accumulated_samples + num)

    def _send_count(self, num):
        if self._has_company():  # alone, not even an array is made: that waits for one of the engine's threads
            self._counted = self._tally.sum(self.trainer._kvstore, nd.array([num], ctx=mx.cpu(), dtype="float64"))

    def _share_weights(self, shard):
        """Before the first gradient, every process takes over the first one's weights (a trainer does it after)."""
        if any(parameter._deferred_init for parameter in self.trainer._params):
            if shard is None:
                raise GradientUnavailable(
                    "the first step has no samples here, and the net's parameters do not know their shapes yet; "
                    "state every layer's in_units or in_channels"
                )
            with mx.autograd.pause():
                self.net(*shard[0])  # makes the parameters whose shapes follow from the input
            # oneDNN has laid weights out anew for that, and ps-lite cannot send such.
            make_plain(*(array for parameter in self.trainer._params for array in parameter.list_data()))
        if not self.trainer._kv_initialized:
            self.trainer._init_kvstore()
        store = self.trainer._kvstore
        if store is not None:
            self.trainer._init_params()
        self._tally.open(store, 1)
        self._losses.open(store)
        self._agreement.open(store, shard)
        checks.warn_of_statistics(self.net, self.devices, store)
        self._weights_are_shared = True

    def _forget_gradients(self):
        """Whatever gradients there are, from a backward pass of the caller's own or a broken step, do not count."""
        for parameter in self._trainable():
            for array in parameter.list_data():
                array._fresh_grad = False
            if parameter.grad_req == "add":
                for gradient in parameter.list_grad():
                    set_zero(gradient)

    def update(self):
        """Update with the gradients accumulated so far; :meth:`step` calls it when they are complete.

        Call it at the end of an epoch whose number of batches is no multiple of `accumulate`; without gradients it
        does nothing.
        """
        if self._accumulated_steps == 0:
            return
        if self._counted is None:
            self._send_count(self._accumulated_samples)
        try:
            self._agreement.check()
            self._complete_gradients()
            reached = [parameter for parameter in self._trainable() if _reached(parameter)]
            self._reached_before = {parameter.name for parameter in reached}
            num = self._losses.divisor(self._sum_gradients(reached))
            if self.loss_scaling.overflowed([parameter.list_grad()[0] for parameter in reached]):
                self._forget_gradients()
                return
            with self.loss_scaling.unscaling():
                self._apply(reached, num)
            self._agreement.update_done()
        finally:  # also after an error: what was accumulated must not leak into the next update
            self._accumulated_samples = self._accumulated_steps = 0
            self._counted = None

    def _apply(self, parameters, num):
        """Update with gradients that are the sums over `num` samples."""
        if self.clip_global_norm is not None:
            self._clip([parameter.list_grad() for parameter in parameters], num)
        if isinstance(self.trainer.optimizer, _ONE_UPDATE_FOR_ALL):
            self._update_first_device(parameters, num)
        else:
            self.trainer.update(num, ignore_stale_grad=self.ignore_stale_grad)

    def _sum_gradients(self, parameters):
        """Sum over everything that takes part; returns the number of samples that the sums are over."""
        store = self.trainer._kvstore
        if store is None:
            allreduce_each([parameter.list_grad() for parameter in parameters])
            return self._accumulated_samples
        self.trainer.allreduce_grads()
        if store.num_workers == 1:
            return self._accumulated_samples
        return int(self._tally.read(self._counted)[0])

    def _update_first_device(self, parameters, num):
        """Update the first device's weights and copy them to the others."""
        trainer = self.trainer
        missed = [parameter.name for parameter in self._trainable() if not _reached(parameter)]
        if missed and not self.ignore_stale_grad:
            raise GradientUnavailable(
                f"the loss did not reach {', '.join(missed)}; pass ignore_stale_grad=True to leave them as they are"
            )
        trainer._check_and_rescale_grad(trainer._scale / num)
        for parameter in parameters:
            arrays = parameter.list_data()
            trainer._updaters[0](trainer._param2idx[parameter.name], parameter.list_grad()[0], arrays[0])
            broadcast(arrays)
            for array in arrays:
                array._fresh_grad = False

    def _complete_gradients(self):
        """A device that had no sample, or whose samples left a parameter out, contributes a gradient of zero."""
        for parameter in self._trainable():
            if not _reached(parameter):
                continue
            for array, gradient in zip(parameter.list_data(), parameter.list_grad()):
                if not array._fresh_grad:
                    if parameter.grad_req == "write":
                        set_zero(gradient)
                    array._fresh_grad = True

    def _clip(self, gradients, num):
        """Scale all gradients, which hold the sum over `num` samples, so that their mean has at most the norm."""
        # Every device holds the same gradients now, so the first device's norm is everybody's.
        gradients = [[as_legacy(gradient) for gradient in copies] for copies in gradients]
        first = [copies[0] for copies in gradients]
        squares = [gradient.astype("float64" if gradient.dtype == np.float64 else "float32") ** 2 for gradient in first]
        norm = nd.add_n(*[square.sum().astype("float32") for square in squares]).sqrt()
        norm = norm * (self.trainer._scale / num)
        scale = nd.minimum(self.clip_global_norm / (norm + 1e-12), 1.0)
        for copies in gradients:
            for gradient in copies:
                factor = scale.as_in_context(gradient.context).astype(gradient.dtype)
                nd.broadcast_mul(gradient, factor.reshape((1,) * gradient.ndim), out=gradient)


def _reached(parameter):
    """Whether the last backward pass reached this parameter on any device."""
    return any(array._fresh_grad for array in parameter.list_data())
