"""One synchronous step: split, run, header, reduce, update.

``DataParallel`` and ``Pipeline`` call it, and hand it functions that cut and run a batch. The header is sent before the
run where a SyncBatchNorm layer and several processes take part, see :class:`.Join`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..allreduce import gradients
from ..errors import GradientUnavailable
from ..kvstore.contract import contract, is_distributed
from ..kvstore.together import repetition_of
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested, as_current, as_tuple, set_zero
from ..mxnet.last_error import is_not_recorded
from ..mxnet.parameters import gradient_storage
from ..mxnet.trainers import LOSS_SCALER, optimizer_of, scale_of, store_of
from ..nn.sync_batch_norm.join import Join, refuse_graphs
from ..nn.sync_batch_norm.participants import sync_groups_of
from ..reduce.reducer import reducer_of, update_copies
from ..reduce.step_header import ZERO_RATE, StepHeader, header_of
from ..split import num_samples
from . import checks, first_step
from .loss_over_batch import LossOverBatch
from .losses import SumsOfParts
from .precision import LossScaling
from .weight_checks import FiniteWeights, WeightsComparison

NAMES = "inputs", "labels"  # of the parts of a batch, for errors


class Options(NamedTuple):
    """Arguments of ``DataParallel`` and ``Pipeline`` that say how they update."""

    accumulate: int
    clip_global_norm: float | None
    ignore_stale_grad: bool


class TrainingStep:
    """Makes steps with `trainer`, and keeps what lives on from one to the next.

    Args:
        net: the net, with the loss where that has layers too.
        store: what :func:`.first_step.connect` has returned for the trainer.
        parts: the names of the loss's parts, if it has some.
        batch_axis: of inputs and labels.

    Attributes:
        num_samples, mean: of the last step, in this process; `number` is that of the step, from 1.
        loss_scaling: of the trainer.
        sums: of a loss of parts, from the first step on.
        over_batch: the loss over the whole batch, where it is one, from the first step on.
    """

    def __init__(
        self,
        net: mx.gluon.Block,
        trainer: mx.gluon.Trainer,
        store: Any,
        parts: Sequence[str],
        batch_axis: int,
        options: Options,
    ) -> None:
        self._net, self._trainer, self._parts, self._options = net, trainer, parts, options
        self._batch_axis, self._is_distributed = batch_axis, is_distributed(store)
        self.num_samples = self.number = 0  # of the last step
        self.mean: mx.nd.NDArray | None = None
        self.gradient_norm: mx.nd.NDArray | None = None  # (1,), of the last update
        self.loss_scaling = LossScaling(trainer)
        self.sums: SumsOfParts | None = None
        self.over_batch: LossOverBatch | None = None
        self._has_started = False
        self._ranks: Any = None  # the processes with which it exchanges
        self._rows: dict[int, tuple] = {}  # id of a row_sparse gradient -> (the gradient, its sum over the steps)
        self._num_updates = 0
        self._num_steps = self._num_samples = 0  # accumulated
        self._is_under_way = False  # whether a header is that nobody has read
        self._num_of_all = 0  # of these samples, those of all processes, as far as headers have said them

    def start(self, run: Callable[[], object] | None, compared: Nested | None, num_parts: int, words: str) -> None:
        """Give all processes the same weights, and prepare the first step, or the first one of other processes.

        Args:
            run: a forward pass; None: there are no samples.
            compared: the inputs of the first shard, which should differ between processes; None: they need not.
            num_parts, words: as of :func:`.checks.warn_of_statistics`.
        """
        net, trainer = self._net, self._trainer
        self._num_steps = self._num_samples = self._num_of_all = 0  # also what was given up outside of a step
        self._is_under_way = False
        self._rows.clear()
        self.loss_scaling.restart()
        first_step.broadcast_weights(net, trainer, run)
        store = store_of(trainer)
        self.sums = SumsOfParts(self._parts, store) if self._parts else None
        self._comparison = WeightsComparison(net, trainer, compared)
        self._repetition = repetition_of(trainer)
        updates_before = 0 if self._repetition is None else self._repetition.num_updates
        self._finite = FiniteWeights(trainer, self._options.accumulate, updates_before)
        self._header: StepHeader | None = header_of(trainer) if is_distributed(store) else None
        self._join = Join(net, store)
        self._joins = bool(self._join)  # then headers go before the forward pass, and several make an update
        self._num_updates = 0
        self._has_started, self._ranks = True, getattr(store, "ranks", None)
        checks.warn_of_statistics(net, num_parts, store, words)

    def __call__(
        self,
        x: Nested | None,
        y: Nested,
        device: mx.Context,
        cut: Callable[[tuple[tuple, tuple], int], Any],
        prepare: Callable[[Any, bool], None],
        run: Callable[[Any, int], mx.nd.NDArray],
    ) -> mx.nd.NDArray:
        """Train on one batch.

        Args:
            x, y: as of ``DataParallel.step``.
            device: of the mean loss, where there are no samples.
            cut: (batch, number of samples) -> its shards, in a form of the caller's.
            prepare: (shards, or None without samples; whether to call :meth:`start`), before the passes.
            run: (shards, number of samples) -> the mean loss; launches the forward and backward passes.

        Returns:
            The mean loss, of shape (1,).
        """
        if x is None or mx.autograd.is_recording():
            checks.check_step(x, self._is_distributed)

        # Split.
        num, shards = 0, None
        if x is not None:
            batch = as_tuple(x), as_tuple(y)
            num = num_samples(batch, self._batch_axis, self._is_distributed, names=NAMES)
            shards = cut(batch, num) if num else None
        self.number += 1
        ranks_changed = getattr(store_of(self._trainer), "ranks", None) is not self._ranks  # after a loss, or a join
        prepare(shards, ranks_changed or not self._has_started)
        if self._num_steps == 0:  # gradients of passes outside of steps do not count
            reducer_of(self._trainer).forget()

        # Run; layers that exchange with other processes are told before who has samples.
        if self._joins:
            self._send(num, self._join.begin_step if num else None)
        try:
            mean = run(shards, num) if num else self._follow(device)
        except BaseException as error:  # Ctrl-C too
            for group in sync_groups_of(self._net):  # whose devices wait for no other then
                group.abandon(error)
            self._abandon()
            if is_not_recorded(error):
                checks.refuse_nothing_to_train(self._net)
            raise
        self.num_samples, self.mean = num, mean
        if self._joins and num:
            self._end_join()
        self._num_samples += num
        self._num_steps += 1
        if self._options.accumulate > 1:
            self._add_rows()

        if self._num_steps == self._options.accumulate:
            self.update()
        return mean

    def update(self) -> None:
        """Header, reduce, update: with the gradients of the steps since the last update, if there are any."""
        if self._num_steps == 0:
            return
        trainer, options, header = self._trainer, self._options, self._header
        try:
            # Header. With ignore_stale_grad, it says which parameters the losses of any process have reached.
            reducer = reducer_of(trainer)
            indices = reducer.reached()
            if header is not None and (options.ignore_stale_grad or not self._joins):
                if options.ignore_stale_grad:
                    header.own["reached"][[reducer.numbers[index] for index in indices]] = 1
                self._send(0 if self._joins else self._num_samples)
                if options.ignore_stale_grad:
                    counts = self._receive()["reached"]
                    indices = [index for index in reducer.indices if counts[reducer.numbers[index]]]
            if self._num_updates + 1 >= self._finite.next_read:
                self._finite.check(self._num_updates)

            # Reduce. Clipping looks at all gradients, an update of a sharded state at those of its own part.
            if indices is not reducer.indices:
                reducer.complete(indices)
            for gradient, total in self._rows.values():  # also of devices without samples in the last of the steps
                total.copyto(gradient)
            reducer.sum(trainer, indices, self._divisor_and_scale, whole=options.clip_global_norm is not None)
            divisor = self._divisor()
            scaled = None if getattr(trainer, LOSS_SCALER, None) is None else self.loss_scaling
            overflow = scaled is not None and scaled.overflowed([reducer.gradients[index][0] for index in indices])
            if self._repetition is not None:  # it waits for all sums: a step that breaks off is repeated
                self._repetition.commit([reducer.parameters[index] for index in indices])
            if overflow:
                reducer.discard()
                return

            # Update.
            with contextlib.nullcontext() if scaled is None else scaled.unscaling():
                if options.clip_global_norm is not None:
                    summed = [reducer.gradients[index] for index in indices]
                    rescale = scale_of(trainer) / divisor
                    self.gradient_norm = gradients.clip(summed, options.clip_global_norm, rescale)
                if len(indices) < len(reducer.indices) and not options.ignore_stale_grad:
                    missed = [reducer.parameters[index].name for index in reducer.indices if index not in {*indices}]
                    raise GradientUnavailable(
                        f"the loss did not reach {', '.join(missed)}; pass ignore_stale_grad=True to leave them as "
                        "they are"
                    )
                optimizer_of(trainer).rescale_grad = scale_of(trainer) / divisor
                update_copies(trainer, reducer, indices)
            self._num_updates += 1
            if self._num_updates == self._comparison.next_look:
                self._comparison.look(self._num_updates)
            if self._num_updates == self._finite.next_look:
                self._finite.look(self._num_updates)
        finally:
            self._abandon()

    def finish(self) -> None:
        """Update with what is accumulated, if anything is, and look at the weights that are there then."""
        if self._has_started:
            self.update()
            self._finite.check(self._num_updates, last=True)

    def has_accumulated(self) -> bool:
        """Whether there are steps that no update has had yet."""
        return self._num_steps > 0

    def _send(self, num_samples: int, then: Callable[[], None] | None = None) -> None:
        """Send the header of a step, or of the steps that make an update; `then` as of :meth:`StepHeader.send`."""
        header = self._header
        assert header is not None
        header.own["samples"], header.own["idle"] = num_samples, num_samples == 0
        header.own["rates"][header.rank] = self._trainer.learning_rate or ZERO_RATE
        if self._comparison.bits is not None:
            self._comparison.write(header)
        header.send(then)
        self._is_under_way = True

    def _receive(self) -> Any:
        """The header's sums; notes the number of samples. ReplicasDiffer: of the weights of an earlier update."""
        assert self._header is not None
        sums, self._is_under_way = self._header.read(), False
        self._num_of_all += int(sums["samples"])
        if self._comparison.bits is not None:
            self._comparison.check(self._num_updates, sums["digest"])
        return sums

    def _divisor(self) -> int:
        """What the update divides the sums by: the samples of all processes, but for a loss that has divided by itself.

        It waits for the header, if that is under way. BatchMismatch: no process had samples.
        """
        if self._is_under_way:
            self._receive()
        num = self._num_samples if self._header is None else self._num_of_all
        if not num:
            checks.refuse_no_samples()
        return 1 if self.sums is not None else num

    def _divisor_and_scale(self) -> float:
        return self._divisor() * self.loss_scaling.scale

    def _follow(self, device: mx.Context) -> mx.nd.NDArray:
        """Run a step without samples: take part in the exchanges of the other processes; gradients are zero then."""
        refuse_graphs(self._net)
        if self._joins:
            mx.nd.waitall()  # so that no call of this process is in flight
        if self.sums is not None:
            self.sums.add_nothing(device)
        if self.over_batch is not None:
            self.over_batch.add_nothing(device)
        if self._joins and self._receive()["idle"] < contract(store_of(self._trainer)).num_workers:
            self._join.follow()
        if not self._options.ignore_stale_grad:  # otherwise the other processes send which parameters they have reached
            reducer = reducer_of(self._trainer)
            reducer.complete(reducer.indices)
        if self.over_batch is not None:
            return self.over_batch.mean_without_samples(device)
        values = {} if self.sums is None else self.sums.values
        return as_current(sum(values.values(), mx.nd.zeros(1, ctx=device)))

    def _end_join(self) -> None:
        """After the launch of a step with samples: read its header; if processes have none, wait for them."""
        try:
            self._receive()
            if self._join.step is not None:
                self._join.end_step()
        except BaseException:
            self._abandon()
            raise

    def _add_rows(self) -> None:
        """Add up the row_sparse gradients of the steps of one update, for which MXNet has no ``grad_req="add"``."""
        for parameter in gradients.trainable(self._trainer):
            if gradient_storage(parameter) == "default":
                continue
            for fresh, gradient in zip(gradients.flags(parameter), parameter.list_grad()):
                if fresh:
                    known = self._rows.get(id(gradient))
                    total = gradient.copy() if known is None else mx.nd.sparse.add(known[1], gradient)
                    self._rows[id(gradient)] = gradient, total
                    set_zero(gradient)  # for a device that has no samples in the next step

    def _abandon(self) -> None:
        """Reset what belongs to one update: after each, and after a failure, so that no part of a batch is left."""
        self._num_samples = self._num_steps = self._num_of_all = 0
        if self._is_under_way and self._header is not None:
            self._is_under_way = False
            self._header.abandon()
        if self._join.step is not None:
            self._join.abandon_step()
        self._rows.clear()
