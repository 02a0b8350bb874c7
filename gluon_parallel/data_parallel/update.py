"""Update of the parameters by the gradients of all devices and processes, after one or several steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..allreduce import gradients
from ..errors import GradientUnavailable, WorkerLost
from ..kvstore.background_sum import BackgroundSum
from ..kvstore.collective import committing
from ..kvstore.contract import contract, is_distributed
from ..kvstore.reserved_keys import REACHED, SAMPLE_COUNT
from ..kvstore.step_plan import StepPlan, plan_of, update_copies
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested, set_zero
from ..mxnet.parameters import gradient_storage
from ..mxnet.trainers import LOSS_SCALER, optimizer_of, parameters_of, scale_of, store_of
from ..nn.sync_batch_norm.join import Join, refuse_graphs
from ..sample_loss import LossPerSample
from . import checks
from .hooked_sum import HookedSum
from .precision import LossScaling
from .shards import shards_of
from .weight_checks import FiniteWeights, WeightsComparison


class UpdateOptions(NamedTuple):
    """Arguments of ``DataParallel``."""

    accumulate: int
    clip_global_norm: float | None
    ignore_stale_grad: bool
    hooked_sum: HookedSum | None = None  # what sums in the place of the trainer's store


class Update:
    """The update of ``DataParallel`` and pipelines after `accumulate` steps; `shard`: the first of the first step."""

    def __init__(
        self,
        net: mx.gluon.Block,
        trainer: mx.gluon.Trainer,
        losses: LossPerSample,
        loss_scaling: LossScaling,
        shard: Nested | None,
        options: UpdateOptions,
    ) -> None:
        self._trainer, self._losses, self._loss_scaling, self._options = trainer, losses, loss_scaling, options
        self._comparison = WeightsComparison(net, trainer, shard)
        self._survival = committing(trainer)  # of lost processes
        updates_before = 0 if self._survival is None else self._survival.num_updates
        self._finite = FiniteWeights(trainer, options.accumulate, updates_before)
        self._sample_count = BackgroundSum(store_of(trainer), SAMPLE_COUNT, 2)
        self._all_reached = (
            BackgroundSum(store_of(trainer), REACHED, len(parameters_of(trainer)))
            if options.ignore_stale_grad and is_distributed(store_of(trainer))
            else None
        )
        self._rows: dict[int, tuple] = {}  # id of a row_sparse gradient -> (the gradient, its sum over the steps)
        self._net, self._join = net, Join(net, store_of(trainer))
        self._joins, self._is_distributed = bool(self._join), is_distributed(store_of(trainer))
        self._shards = shards_of(trainer)
        self._num_updates = 0
        self._num_steps = self._num_samples = 0  # accumulated
        self._num_unsent = 0  # of these samples
        # The numbers of samples, and of processes without any, in each step: arrays that become them, or values.
        self._counts: list[Any] = []

    def begin_step(self, num_samples: int) -> None:
        """Before each step: forget old gradients; with the last step before an update, send the number of samples.

        It is back before the gradients are. Layers that exchange with other processes need it in each step.
        """
        if self._num_steps == 0:
            plan_of(self._trainer).forget()
        self._num_unsent += num_samples
        if self._joins or self._num_steps + 1 == self._options.accumulate:
            self._send_count(num_samples)

    def follow(self, launch: Callable[[], object]) -> None:
        """A step without samples: take part in that of the others, after ``launch()``; leaves gradients of zero."""
        refuse_graphs(self._net)
        if self._joins:
            mx.nd.waitall()  # so that no call of this process is in flight
        launch()
        if self._joins and self._read_counts()[-1][1] < contract(store_of(self._trainer)).num_workers:
            self._join.follow()
        if not self._options.ignore_stale_grad:  # otherwise the other processes send which parameters they have reached
            plan = plan_of(self._trainer)
            plan.complete(plan.places)

    def end_step(self, num_samples: int) -> None:
        """After each step: its gradients are there; update with those of all steps that make one."""
        if self._joins and num_samples:
            try:
                self._read_counts()
                if self._join.step is not None:
                    self._join.end_step()
            except BaseException:
                self.abandon()
                raise
        self._num_samples += num_samples
        self._num_steps += 1
        if self._options.accumulate > 1:
            self._add_rows()
        if self._num_steps == self._options.accumulate:
            self.apply()

    def abandon(self) -> None:
        """Forget what was accumulated: half a batch must not leak into the next update."""
        self._num_samples = self._num_steps = self._num_unsent = 0
        for counts in self._counts:
            if not isinstance(counts, np.ndarray):  # a step that has failed
                self._sample_count.discard(counts)
        self._counts = []
        if self._join.step is not None:
            self._join.abandon_step()
        self._rows.clear()

    def apply(self) -> None:
        """Update with the gradients accumulated so far, if there are any."""
        if self._num_steps == 0:
            return
        if not self._counts:
            self._send_count(self._num_samples)
        try:
            if self._num_updates + 1 >= self._finite.reads_at:
                self._finite.check(self._num_updates)
            if self._comparison.is_pending:
                self._comparison.check(self._num_updates)
            plan = plan_of(self._trainer)
            reached = self._reached(plan)
            plan.complete(reached)
            for gradient, total in self._rows.values():  # also of devices without samples in the last of the steps
                total.copyto(gradient)
            num = self._sum(plan, reached)
            if not num:
                checks.refuse_no_samples()
            num = 1 if self._losses.is_divided else num
            scaled = None if getattr(self._trainer, LOSS_SCALER, None) is None else self._loss_scaling
            overflow = scaled is not None and scaled.overflowed([plan.gradients[place][0] for place in reached])
            if self._survival is not None:
                self._survival.commit([plan.parameters[place] for place in reached])
            if overflow:
                plan.forget()
                if self._options.hooked_sum is not None:
                    self._options.hooked_sum.undo()
                return
            with contextlib.nullcontext() if scaled is None else scaled.unscaling():
                self._step_optimizer(plan, reached, num)
            self._num_updates += 1
            if self._num_updates == self._comparison.looks_at:
                # The update is made. A loss that is noticed only now ends the next step's exchanges too.
                with contextlib.nullcontext() if self._survival is None else contextlib.suppress(WorkerLost):
                    self._comparison.look(self._num_updates)
            if self._num_updates == self._finite.looks_at:
                self._finite.look(self._num_updates)
        finally:
            self.abandon()

    @property
    def num_accumulated(self) -> int:
        """How many steps the next update has so far."""
        return self._num_steps

    def finish(self) -> None:
        """Update with what is accumulated, if anything is, and look at the weights that are there then."""
        self.apply()
        self._finite.check(self._num_updates, last=True)

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

    def _reached(self, plan: StepPlan) -> Sequence[int]:
        """The places of the parameters to update: those that the loss has reached on any device of any process."""
        reached = plan.reached()
        if self._all_reached is None:
            return reached
        found = {plan.numbers[place] for place in reached}
        total = self._all_reached.sum([number in found for number in range(len(parameters_of(self._trainer)))])
        counts = self._all_reached.read(total, missing="no word of which parameters their losses reached")
        return [place for place in plan.places if counts[plan.numbers[place]]]

    def _send_count(self, num_in_step: int) -> None:
        if self._is_distributed:
            announce = self._join.begin_step if self._joins and num_in_step else None
            self._counts.append(self._sample_count.sum([self._num_unsent, num_in_step == 0], announce))
        self._num_unsent = 0

    def _read_counts(self) -> list[np.ndarray]:
        """Those of all processes."""
        self._counts = [one if isinstance(one, np.ndarray) else self._sample_count.read(one) for one in self._counts]
        return self._counts

    def _sum(self, plan: StepPlan, places: Sequence[int]) -> int:
        """Sum the gradients over all devices and processes; returns the number of samples that the sums are over."""
        hooked_sum = self._options.hooked_sum
        if hooked_sum is not None:
            num = self._count()
            if not num:
                checks.refuse_no_samples()
            parameters = [plan.parameters[place] for place in places]
            hooked_sum.sum(parameters, (1 if self._losses.is_divided else num) * self._loss_scaling.scale)
        elif self._shards is not None and self._is_distributed:
            self._shards.sum(whole=self._options.clip_global_norm is not None)
        else:
            plan.sum(self._trainer, places)
        return self._count()

    def _count(self) -> int:
        if self._is_distributed:
            return int(sum(counts[0] for counts in self._read_counts()))
        return self._num_samples

    def _step_optimizer(self, plan: StepPlan, places: Sequence[int], num: int) -> None:
        """Update with gradients that are the sums over `num` samples."""
        if self._options.clip_global_norm is not None:
            summed = [plan.gradients[place] for place in places]
            gradients.clip(summed, self._options.clip_global_norm, scale_of(self._trainer) / num)
        if len(places) < len(plan.places) and not self._options.ignore_stale_grad:
            missed = [plan.parameters[place].name for place in plan.places if place not in {*places}]
            raise GradientUnavailable(
                f"the loss did not reach {', '.join(missed)}; pass ignore_stale_grad=True to leave them as they are"
            )
        optimizer_of(self._trainer).rescale_grad = scale_of(self._trainer) / num
        update_copies(self._trainer, plan, places, self._shards)
