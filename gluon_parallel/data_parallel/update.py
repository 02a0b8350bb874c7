"""Update of the parameters by the gradients of all devices and processes, after one or several steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from ..allreduce import gradients
from ..errors import GradientUnavailable
from ..kvstore.collective import committing
from ..kvstore.contract import contract, is_distributed
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import Nested, set_zero
from ..mxnet.parameters import gradient_storage
from ..mxnet.trainers import LOSS_SCALER, optimizer_of, scale_of, store_of
from ..nn.sync_batch_norm.join import Join, refuse_graphs
from ..reduce.hooked_sum import HookedSum
from ..reduce.reducer import Reducer, reducer_of, update_copies
from ..reduce.step_header import StepHeader, header_of
from ..sample_loss import LossPerSample
from . import checks
from .precision import LossScaling
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
        self._header: StepHeader | None = header_of(trainer) if is_distributed(store_of(trainer)) else None
        self._rows: dict[int, tuple] = {}  # id of a row_sparse gradient -> (the gradient, its sum over the steps)
        self._net, self._join = net, Join(net, store_of(trainer))
        self._joins = bool(self._join)  # then headers go before the forward pass, and several make an update
        self._num_updates = 0
        self.gradient_norm: mx.nd.NDArray | None = None  # (1,), of the last update
        self._num_steps = self._num_samples = 0  # accumulated
        self._is_under_way = False  # whether a header is that nobody has read
        self._num_of_all = 0  # of these samples, those of all processes, as far as headers have said them

    def begin_step(self, num_samples: int) -> None:
        """Before each step: forget old gradients; send the header if layers exchange with other processes."""
        if self._num_steps == 0:
            reducer_of(self._trainer).forget()
        if self._joins:
            self._send(num_samples, self._join.begin_step if num_samples else None)

    def follow(self, launch: Callable[[], object]) -> None:
        """A step without samples: take part in that of the others, after ``launch()``; leaves gradients of zero."""
        refuse_graphs(self._net)
        if self._joins:
            mx.nd.waitall()  # so that no call of this process is in flight
        launch()
        if self._joins and self._receive()["idle"] < contract(store_of(self._trainer)).num_workers:
            self._join.follow()
        if not self._options.ignore_stale_grad:  # otherwise the other processes send which parameters they have reached
            reducer = reducer_of(self._trainer)
            reducer.complete(reducer.places)

    def end_step(self, num_samples: int) -> None:
        """After each step: its gradients are there; update with those of all steps that make one."""
        if self._joins and num_samples:
            try:
                self._receive()
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
        self._num_samples = self._num_steps = self._num_of_all = 0
        if self._is_under_way and self._header is not None:
            self._is_under_way = False
            self._header.abandon()
        if self._join.step is not None:
            self._join.abandon_step()
        self._rows.clear()

    def apply(self) -> None:
        """Header, sums and update: with the gradients accumulated so far, if there are any."""
        if self._num_steps == 0:
            return
        trainer, options, header = self._trainer, self._options, self._header
        try:
            reducer = reducer_of(trainer)
            places = reducer.reached()  # with ignore_stale_grad, by the loss on any process: the header says it
            if header is not None and (options.ignore_stale_grad or not self._joins):
                if options.ignore_stale_grad:
                    header.own["reached"][[reducer.numbers[place] for place in places]] = 1
                self._send(0 if self._joins else self._num_samples)
                if options.ignore_stale_grad:
                    counts = self._receive()["reached"]
                    places = [place for place in reducer.places if counts[reducer.numbers[place]]]
            if self._num_updates + 1 >= self._finite.reads_at:
                self._finite.check(self._num_updates)
            if places is not reducer.places:
                reducer.complete(places)
            for gradient, total in self._rows.values():  # also of devices without samples in the last of the steps
                total.copyto(gradient)

            hook = options.hooked_sum
            if hook is not None:
                pass  # it needs the number of samples
            elif reducer.shards is not None and header is not None:
                reducer.shards.sum(whole=options.clip_global_norm is not None)
            else:
                reducer.sum(trainer, places)
            if self._is_under_way:
                self._receive()
            num = self._num_samples if header is None else self._num_of_all
            if not num:
                checks.refuse_no_samples()
            num = 1 if self._losses.is_divided else num
            if hook is not None:
                hook.sum([reducer.parameters[place] for place in places], num * self._loss_scaling.scale)

            scaled = None if getattr(trainer, LOSS_SCALER, None) is None else self._loss_scaling
            overflow = scaled is not None and scaled.overflowed([reducer.gradients[place][0] for place in places])
            if self._survival is not None:
                self._survival.commit([reducer.parameters[place] for place in places])
            if overflow:
                reducer.forget()
                if hook is not None:
                    hook.undo()
                return
            with contextlib.nullcontext() if scaled is None else scaled.unscaling():
                if options.clip_global_norm is not None:
                    summed = [reducer.gradients[place] for place in places]
                    self.gradient_norm = gradients.clip(summed, options.clip_global_norm, scale_of(trainer) / num)
                if len(places) < len(reducer.places) and not options.ignore_stale_grad:
                    self._refuse_missed(reducer, places)
                optimizer_of(trainer).rescale_grad = scale_of(trainer) / num
                update_copies(trainer, reducer, places)
            self._num_updates += 1
            if self._num_updates == self._comparison.looks_at:
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

    def _send(self, num_samples: int, then: Callable[[], None] | None = None) -> None:
        """Send the header of a step, or of the steps that make an update; `then` as of :meth:`StepHeader.send`."""
        header = self._header
        assert header is not None
        header.own["samples"], header.own["idle"] = num_samples, num_samples == 0
        header.own["rates"][header.rank] = self._trainer.learning_rate
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

    @staticmethod
    def _refuse_missed(reducer: Reducer, places: Sequence[int]) -> NoReturn:
        missed = [reducer.parameters[place].name for place in reducer.places if place not in {*places}]
        raise GradientUnavailable(
            f"the loss did not reach {', '.join(missed)}; pass ignore_stale_grad=True to leave them as they are"
        )
