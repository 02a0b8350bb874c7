"""Survival of lost processes: the others repeat what was under way, or copy its result from one that has it.

A new process is one that is behind, of which the others know when it comes.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import numpy as np

from ... import kvstore
from ...allreduce import gradients
from ...errors import LOG, GradientUnavailable
from ...kvstore import heartbeat
from ...kvstore.collective import SURVIVALS, gather, gather_objects
from ...kvstore.contract import contract
from ...kvstore.protocols import Regrouping, offers
from ...mxnet.compat import mx
from ...mxnet.engine.failures import drop_tracebacks
from ...mxnet.parameters import forget_call_with_first_values, has_values, is_differentiable
from ...mxnet.trainers import (
    has_made_store,
    make_store,
    parameters_of,
    set_progress_of_store,
    waiting_for_store,
    want_store,
)
from ...nn.sync_batch_norm.join import end_abandoned_steps
from ...nn.sync_batch_norm.participants import forget_failures, groups_of
from ...nn.sync_batch_norm.sync_group import all_groups
from ...step import trainer_loops
from ...step.first_step import broadcast_others
from ...survive import meeting, newcomers
from ..checkpoint import restore, state
from ..checkpoint.state import is_divided, opened_store
from .loaders import LoaderShard, shard_loader
from .repetition import Step, arrays_of, note, read, snapshot
from .unpacked import UnpackedStep

_NOTHING = object()  # in the place of a result that no other process has


def survive(
    step: Callable[..., Any], net: mx.gluon.Block, trainer: mx.gluon.Trainer, *loaders: Any, seed: int = 0,
    batch_axis: int = 0,
) -> Any:  # fmt: skip
    """Let a loop of your own go on without processes that are lost, under ``gluon-parallel launch --min-processes``.

    ``gp.prepare`` does it by itself. After a loss, the step that was under way is called again, with the same batch
    divided among the processes that are left. So the weights are those of an undisturbed run, to rounding. Call it on
    all processes, before the first step; without ``--min-processes`` the loop runs as it would, with the same checks.

    Args:
        step: function of one batch, or of its parts, that trains on it: ``parallel.step`` of a ``gp.DataParallel``, or
            one of your own that ends with ``parallel.step(...)``, ``trainer.step(...)`` or ``trainer.update(...)`` at
            most once. It may be called again, so it counts nothing. Divide by the samples of the whole batch, which
            ``parallel.step`` does: ``trainer.step(64)``.
        net, trainer: what it trains. The trainer has the store.
        loaders: as of ``gp.prepare``: ``gluon.data.DataLoader`` or ``gp.datasets.batches``, of the whole data, or of
            this process's part by ``gp.sampler.BatchSampler(..., rank, num_workers)``. A DataLoader is changed.
        seed: of the order of the samples of shuffled loaders without an order of their own.
        batch_axis: the axis that counts samples, for batches with fewer samples than there are processes.

    Returns:
        What is called in the place of `step`, a :class:`Survival`, and then the loaders in the order given. The arrays
        that it is called with are those of the batch as a loader has yielded it, all or some of them; change them in
        `step`. ``survival.together(function)`` repeats what else takes all processes.

    Raises:
        TypeError: a loader cannot be divided.
        BatchMismatch: by a step: an array is not one of the batch.
        GradientUnavailable: the trainer updates outside of the step, or a second time in it.

    Example:
        >>> import gluon_parallel as gp
        >>> net = mx.gluon.nn.Dense(1, in_units=3)
        >>> net.initialize()
        >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        >>> parallel = gp.DataParallel(net, mx.gluon.loss.L2Loss(), trainer)
        >>> data = mx.gluon.data.ArrayDataset(mx.nd.ones((5, 3)), mx.nd.ones((5, 1)))
        >>> step, train = gp.survive(parallel.step, net, trainer, mx.gluon.data.DataLoader(data, 4))
        >>> for x, y in train:
        ...     loss = step(x, y)
        >>> step.num_steps
        2
    """
    store = opened_store(trainer)
    if isinstance(store, str):
        store = want_store(trainer, kvstore.create(store))
    store = contract(store)
    if not has_made_store(trainer):
        broadcast_others(net, trainer, store)
    shards = [shard_loader(loader, store.rank, store.num_workers, seed, batch_axis) for loader in loaders]
    survival = Survival(step, net, trainer, shards, store)
    survival.join()
    return UnpackedStep((survival, *shards))


class Survival:
    """A training's steps, which are repeated after a loss; made by :func:`survive`.

    What all processes do together, an update or a call of :meth:`together`, is numbered. No process can have done
    number n + 1 before all have contributed to number n, so those that are left are at most one number apart. Who is
    behind takes the result from one that has it: of an update, the state of the net and its trainer. If all are equally
    far, all repeat what was under way, with the lost process's part divided among them. Steps that only accumulate
    gradients are repeated with the update.

    An update is committed when all sums over the processes are there (:meth:`commit`); before, it has changed nothing
    but what :func:`.snapshot` keeps. So no copy of the weights is needed, but in the first step, which sends them.

    Args:
        step, net, trainer: as of :func:`survive`.
        loaders: the shards of its loaders.
        store: through which the processes meet.
        reseed: starts the random numbers of the step of that number before it is repeated.
        unfinished: what the step under way would have returned; by default what another process's step returned.
        loop: what begins in the middle in a new process, if it is not a loop over :meth:`epochs`: ``loop.content()``
            returns what it has, which pickle takes, and ``loop.take(content)`` goes on from there.

    Attributes:
        num_steps, num_updates: how many have been made.
        epoch: that of :meth:`epochs` which is under way, or comes next.
    """

    def __init__(
        self, step: Callable[..., Any], net: mx.gluon.Block, trainer: mx.gluon.Trainer, loaders: Sequence[LoaderShard],
        store: Any, reseed: Callable[[int], None] = lambda number: None,
        unfinished: Optional[Callable[[], Any]] = None, loop: Any = None,
    ) -> None:  # fmt: skip
        self.trainer, self._function, self._net = trainer, step, net
        self._loaders, self._store = loaders, store
        self._reseed, self._unfinished, self._loop = reseed, unfinished, loop
        self.num_steps = self.num_updates = self.epoch = 0
        self._begins_anywhere = loop is not None  # whether a new process can begin in the middle of the loop
        self._steps: list[Step] = []  # since the last update, the one under way included
        self._put_back: Callable[[], None] = lambda: None  # undoes them
        self._num_done = 0
        self._done: tuple[bool, Any] = False, None  # whether number `_num_done` was an update, and its result
        self._is_inside = self._has_updated = False
        self._survives = kvstore.survives(store)
        if offers(store, Regrouping):
            SURVIVALS.set(store, self)
        self._newcomers: Optional[newcomers.Newcomers] = None
        if self._survives and kvstore.may_join() and loaders:
            if is_divided(trainer):
                raise ValueError(
                    "shard_optimizer=True, a communication hook or 2-bit compression: of what each process keeps for "
                    "itself, one that joins has nothing. Leave it out, or --max-processes of the launcher"
                )
            self._newcomers = newcomers.Newcomers(net, trainer, store)
            self._position: Any = None  # where a new process begins
            loaders[0].between = functools.partial(self._between_steps, loaders[0].between)
        if self._survives and kvstore.joins() is None:
            heartbeat.send(heartbeat.GOES_ON)

    def epochs(self, num: int) -> Iterator[int]:
        """Number the epochs of a loop of your own up to `num` - 1; a process that joins begins with that under way.

        Each has one pass over the first loader.
        """
        self._begins_anywhere = True
        while self.epoch < num:
            yield self.epoch
            self.epoch += 1

    def __call__(self, *arguments: Any) -> Any:
        """The step's result; arrays among its `arguments` are those of the last batch that a loader has yielded."""
        if self._is_inside:
            raise GradientUnavailable("a step of gp.survive is called inside of another one, or of together(...)")
        if self._newcomers is not None and not self._begins_anywhere:
            raise GradientUnavailable(
                "step: by --max-processes others may join this training, and its loop cannot begin in the middle; of "
                "step, train = gp.survive(...) write `for epoch in step.epochs(num):`, or leave out --max-processes"
            )
        step = note(self.num_steps, arguments, self._loaders)
        if self._survives and not self._steps:
            self._put_back = snapshot(self._changing, self.trainer)
        self._steps.append(step)

        def repeat() -> None:
            nonlocal arguments
            self._repeat(self._steps[:-1])
            arguments = self._read(step)

        result = self._until_done(lambda: self._function(*arguments), repeat)
        self.num_steps += 1
        return result

    def together(self, function: Callable[[], Any]) -> Any:
        """What ``function()`` returns, which takes all processes; it is called again where one is lost meanwhile.

        ``gp.evaluate`` with a loader of the training, ``gp.checkpoint.save`` and ``load`` need it not. All processes
        call it with a function that returns the same on all, and that reads this process's part of data from the
        training's loaders: ``accuracy = step.together(lambda: my_accuracy(net, test, store))``.
        """
        if self._is_inside:
            return function()
        epochs = [loader.epoch for loader in self._loaders]
        begun = has_made_store(self.trainer), list(waiting_for_store(self.trainer))

        def repeat() -> None:
            for loader, epoch in zip(self._loaders, epochs):
                if loader.epoch != epoch:  # a pass of the function, which has begun
                    loader.set_epoch(epoch)
            if not self._steps:
                set_progress_of_store(self.trainer, *begun)
            self._repeat(self._steps)

        return self._until_done(function, repeat, is_step=False)

    def divides(self, loaders: Sequence[Any]) -> bool:
        """Whether each of these is a loader that is divided anew after a loss."""
        return all(any(loader is mine for mine in self._loaders) for loader in loaders)

    def commit(self, parameters: Sequence[mx.gluon.Parameter]) -> None:
        """Before the update of these parameters: wait until all sums, and first weights, of the processes are there."""
        if self._has_updated or not self._is_inside:
            what = "twice in a step, of which" if self._is_inside else "outside of its step, where"
            raise GradientUnavailable(
                f"the trainer updates {what} a loss could not undo it: of step, *loaders = gp.survive(...) call "
                "step(batch) once for each, and for accumulated gradients step.together(parallel.update)"
            )
        if self._survives:
            gradients.wait(parameters)
            if self.num_updates == 0:  # gluon.Trainer sends the weights when their gradients are there
                for parameter in parameters_of(self.trainer):
                    for array in parameter.list_data() if has_values(parameter) else ():
                        array.wait_to_read()
            self._store.check()
        self._has_updated = True

    def _read(self, step: Step) -> tuple:
        """The arguments of a step, of the batch as it is divided now."""
        self._reseed(step.number)
        return read(step)

    @kvstore.outermost()
    def _repeat(self, steps: Sequence[Step]) -> None:
        """Repeat steps that have only accumulated gradients."""
        for step in steps:
            self._inside(self._function, *self._read(step))

    def _inside(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._is_inside, self._has_updated = True, False
        try:
            return function(*arguments)
        finally:
            self._is_inside = False

    def _until_done(self, function: Callable[[], Any], repeat: Callable[[], None], is_step: bool = True) -> Any:
        """What ``function()`` returns, or has returned to another process. Before it is called again: ``repeat()``."""
        before, result = (lambda: None), _NOTHING
        while True:
            try:
                before()
                if result is _NOTHING:
                    given = self._inside(function)
                    if self._has_updated or not is_step:
                        self._note_done(self._has_updated, given)
                    elif self._survives:  # nothing has waited for it yet, and the script must not get what a loss ends
                        for leaf in arrays_of(given):
                            leaf.wait_to_read()
                        self._store.check()
                    result = given
                return result
            except BaseException as error:
                is_loss = isinstance(error, Exception) and self._survives and kvstore.has_failed(self._store)
                if self._has_updated or not is_loss:
                    if is_step:
                        self._steps.clear()  # as DataParallel forgets what it has accumulated
                    raise
            others_result = self._regroup(is_step)
            result = result if others_result is _NOTHING else others_result
            work = repeat if result is _NOTHING else functools.partial(self._repeat, self._steps)
            before = functools.partial(self._and_go_back, work)

    def _and_go_back(self, work: Callable[[], None]) -> None:
        """``work()`` that reads batches anew, after which the passes go on from where they were."""
        positions = [(each, each.number) for loader in self._loaders if (each := loader.under_way) is not None]
        work()
        for each, number in positions:
            if each.number != number:
                each.go_to(number)

    def _note_done(self, is_update: bool, result: Any) -> None:
        self._num_done += 1
        self._done = is_update, result
        if is_update:
            for parameter in self._changing:  # of those that no batch has reached yet, see `snapshot`
                forget_call_with_first_values(parameter)
            self.num_updates += 1
            self._steps.clear()

    def _between_steps(self, before: Callable[[], None]) -> None:
        """Between two batches of the first loader: meet a new process, if all have heard of one."""
        before()
        if self._newcomers is None or self._steps or not self.num_updates or self._is_inside:
            return
        if self._newcomers.leaves:
            newcomers.leave_after_step()
        try:
            new = self._newcomers.after_step()
        except Exception:
            if not kvstore.has_failed(self._store):
                raise
            return  # the next step deals with it
        if new is None:
            return
        content = None if self._loop is None else self._loop.content()
        passes = [loader.position for loader in self._loaders]
        self._position = passes, self.num_steps, self.num_updates, self.epoch, content
        began = time.monotonic()
        try:
            self._regroup(False, functools.partial(self._newcomers.connect, new))
        except newcomers.Differs as error:
            self._newcomers.refuse(new, error)
            return
        except meeting.DidNotJoin as error:
            self._regroup(False)
            self._newcomers.refuse(new, error)
            return
        if new.number in self._store.ranks:
            self._say_joined(new, time.monotonic() - began)

    def join(self) -> bool:
        """In a new process: wait for those that train, and go on where they are; returns whether it is one."""
        if self._newcomers is None or kvstore.joins() is None:
            return False
        try:
            self._num_done = -1
            if not has_made_store(self.trainer):  # alone: it gets the weights with the state of the others
                make_store(self.trainer)
            self._regroup(False, self._newcomers.accept)
        except Exception as error:
            newcomers.leave(error)
        heartbeat.send(heartbeat.GOES_ON)
        heartbeat.send(heartbeat.JOINED)
        return True

    @kvstore.outermost()
    def _regroup(self, is_step: bool, meet: Optional[Callable[[], None]] = None) -> Any:
        """Go on with those that are left; returns the result of what was under way, if another process has it.

        With `meet`, which meets a new process, go on with that one, too.
        """
        began, lost, store = time.monotonic(), [], self._store
        before = set(store.ranks)
        while True:
            if kvstore.has_failed(store):
                kvstore.end_exchanges(store)
            end_abandoned_steps()
            forget_failures()
            drop_tracebacks()
            if self._steps:
                self._put_back()
            trainer_loops.forget(self.trainer)
            if meet is None:
                lost += kvstore.regroup(store)
            else:
                meet()
            try:
                if meet is not None:
                    meet = None
                    meeting.share_memory(store)
                self._reconnect()
                for loader in self._loaders:
                    loader.divide(store.rank, store.num_workers)
                row = np.array([self._num_done, self.num_steps, is_step], np.float64)
                rows = gather(store, "gp.survive()", row)
                numbers, result = rows[:, 0], _NOTHING
                if numbers.min() < numbers.max():
                    has_new = numbers.min() < 0
                    result = self._take(int(numbers.argmax()), numbers.max() > self._num_done, has_new)
                    if has_new:  # from here on it is one of them
                        gather(store, "gp.survive()", np.zeros(1))
                break
            except Exception:
                if not kvstore.has_failed(store):  # else the next one has been lost
                    raise
        lost = [number for number in lost if number in before]
        if not lost:
            return result
        rows = rows[numbers >= 0]  # a new one does not know where it is
        _, step, in_step = rows[rows[:, 0].argmin()]
        where = f"in step {step + 1:.0f}" if in_step else f"after step {step:.0f}"
        self._say(where, lost, time.monotonic() - began)
        return result

    def _reconnect(self) -> None:
        """Have the SyncBatchNorm layers meet those that are left: those of the net first, which all processes have."""
        mine = groups_of(self._net)
        gc.collect()  # else one process would meet for a net that is gone
        others = [group for group in all_groups() if group.whole is self._store and group not in mine]
        for group in [*mine, *others]:
            group.reconnect(self._store)

    def _say(self, where: str, lost: Sequence[int], seconds: float) -> None:
        """One line per loss, in the logs of all processes and on the launcher's terminal."""
        names, num_left = ", ".join(map(str, sorted(lost))), self._store.num_workers
        text = f"lost {where}: process {names}; {num_left} go on after {seconds:.2f} s"
        if not heartbeat.is_heard():
            LOG.warning(f"gluon_parallel: {text}")
        elif self._store.rank == 0:
            heartbeat.send(f"{heartbeat.SAYS}{text}")
            heartbeat.send(heartbeat.LEFT_OUT + " ".join(map(str, lost)))

    def _say_joined(self, new: newcomers.Newcomer, seconds: float) -> None:
        num = self._store.num_workers
        if self._store.rank == 0:
            text = f"joined after step {self.num_steps}: process {new.number} on {new.host}; {num} go on after"
            heartbeat.send(f"{heartbeat.SAYS}{text} {seconds:.2f} s")

    def _take(self, source: int, is_behind: bool, has_new: bool) -> Any:
        """The last result of process `source`, if this one is behind it; of an update, the state goes into the net.

        One that is new (`has_new`) gets the state in any case, and where the loop is.
        """
        net, trainer, mine = self._net, self.trainer, None
        if self._store.rank == source:
            is_update, result = self._done
            result = None if is_update and self._unfinished is not None else result
            position = self._position if has_new else None
            mine = is_update, state(net, trainer) if is_update or has_new else None, result, self._num_done, position
        found = gather_objects(mine, self._store, "gp.survive()")[source]
        if not is_behind:
            return _NOTHING
        is_update, archive, result, num_done, position = found
        if self._num_done < 0:
            set_progress_of_store(trainer, True, [])
            restore(archive, net, trainer)
            self._begin_at(position)
            self._num_done = num_done
            return _NOTHING
        if is_update:
            set_progress_of_store(trainer, True, [])  # the others have all weights
            restore(archive, net, trainer)
            result = result if self._unfinished is None else self._unfinished()
        self._note_done(is_update, result)
        return result

    def _begin_at(self, position: tuple) -> None:
        """Go on from where the others were when they met this new process."""
        passes, self.num_steps, self.num_updates, self.epoch, content = self._position = position
        for loader, place in zip(self._loaders, passes):
            loader.set_epoch(*place)
        if self._loop is not None:
            self._loop.take(content)

    @property
    def _changing(self) -> list[Any]:
        """What a step changes before it is committed: the first all parameters, others running statistics (C,)."""
        return self._statistics if self.num_updates else list(self._net.collect_params().values())

    @functools.cached_property
    def _statistics(self) -> list[Any]:
        parameters = self._net.collect_params().values()
        return [one for one in parameters if not is_differentiable(one) and len(one.shape) == 1]
