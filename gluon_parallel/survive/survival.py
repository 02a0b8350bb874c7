"""Survival: steps and calls of all processes, each of which is repeated, or its result taken over, after a loss.

A new process catches up in the same way as one that is behind after a loss.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import numpy as np

from .. import kvstore, launcher
from ..errors import GradientUnavailable
from ..kvstore.collective import gather
from ..kvstore.protocols import Regrouping, offers
from ..kvstore.together import REPETITIONS
from ..mxnet.compat import mx
from ..mxnet.parameters import has_values
from ..mxnet.trainers import has_made_store, parameters_of, set_progress_of_store, waiting_for_store
from .joining import Joining
from .progress import NOTHING, Progress
from .refusals import refuse
from .regrouping import Regrouper, has_failed
from .snapshot import snapshot
from .steps import Loader, Step, arguments_of, arrays_of, record_step


def wait_for_gradients(parameters: Sequence[mx.gluon.Parameter]) -> None:
    """Wait for all copies; raises what has kept one of them from being computed or summed."""
    for parameter in parameters:
        for gradient in parameter.list_grad():
            gradient.wait_to_read()


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
        step, net, trainer: as of :func:`gluon_parallel.survive`.
        loaders: the parts of its loaders.
        store, state, restore, unfinished, loop: as of :class:`.Progress`; without a `loop`, a new process can begin in
            a loop over :meth:`epochs` alone.
        reseed: starts the random numbers of the step of that number before it is repeated.

    Attributes:
        progress: how far this process is.
    """

    def __init__(
        self, step: Callable[..., Any], net: mx.gluon.Block, trainer: mx.gluon.Trainer, loaders: Sequence[Loader],
        store: Any, state: Callable[..., Any], restore: Callable[..., None],
        reseed: Callable[[int], None] = lambda number: None, unfinished: Optional[Callable[[], Any]] = None,
        loop: Any = None,
    ) -> None:  # fmt: skip
        self.trainer, self._function, self._net, self._loaders = trainer, step, net, loaders
        self._store, self._reseed = store, reseed
        self.progress = Progress(net, trainer, loaders, store, state, restore, unfinished, loop)
        self._regrouper = Regrouper(net, trainer, loaders, store, self.progress)
        self._begins_anywhere = loop is not None  # whether a new process can begin in the middle of the loop
        self._put_back: Callable[[], None] = lambda: None  # undoes the steps since the last update
        self._is_inside = self._has_updated = False
        self._survives = kvstore.repeats(store)
        if self._survives:
            refuse(net, trainer, store)
        if offers(store, Regrouping):
            REPETITIONS.set(store, self)
        self._joining: Optional[Joining] = None
        if self._survives and kvstore.may_join() and loaders:
            meet = functools.partial(self._regroup, False)
            self._joining = Joining(net, trainer, store, self.progress, meet)
            loaders[0].between = functools.partial(self._between_steps, loaders[0].between)
        if self._survives and kvstore.joins() is None:
            launcher.send(launcher.GOES_ON)

    @property
    def num_steps(self) -> int:
        """How many steps have been made."""
        return self.progress.num_steps

    @property
    def num_updates(self) -> int:
        """How many updates have been made."""
        return self.progress.num_updates

    @property
    def epoch(self) -> int:
        """That of :meth:`epochs` which is under way, or comes next."""
        return self.progress.epoch

    def epochs(self, num: int) -> Iterator[int]:
        """Number the epochs of a loop of your own up to `num` - 1; a process that joins begins with that under way.

        Each has one pass over the first loader.
        """
        self._begins_anywhere = True
        while self.epoch < num:
            yield self.epoch
            self.progress.epoch += 1

    def __call__(self, *arguments: Any) -> Any:
        """The step's result; arrays among its `arguments` are those of the last batch that a loader has yielded."""
        if self._is_inside:
            raise GradientUnavailable("a step of gp.survive is called inside of another one, or of together(...)")
        if self._joining is not None and not self._begins_anywhere:
            raise GradientUnavailable(
                "step: by --max-processes others may join this training, and its loop cannot begin in the middle; of "
                "step, train = gp.survive(...) write `for epoch in step.epochs(num):`, or leave out --max-processes"
            )
        step = record_step(self.num_steps, arguments, self._loaders)
        if self._survives and not self.progress.steps:
            self._put_back = snapshot(self.progress.changing, self.trainer)
        self.progress.steps.append(step)

        def repeat() -> None:
            nonlocal arguments
            self._repeat(self.progress.steps[:-1])
            arguments = self._read(step)

        result = self._until_done(lambda: self._function(*arguments), repeat)
        self.progress.num_steps += 1
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
            if not self.progress.steps:
                set_progress_of_store(self.trainer, *begun)
            self._repeat(self.progress.steps)

        def run() -> Any:
            result = function()
            if self._survives and not self._has_updated:  # what has no exchange has then been done by all processes
                gather(self._store, "survival.together()", np.zeros(1))
            return result

        return self._until_done(run, repeat, is_step=False)

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
            wait_for_gradients(parameters)
            if self.num_updates == 0:
                refuse(self._net, self.trainer, self._store)
                # gluon.Trainer sends the weights when their gradients are there.
                for parameter in parameters_of(self.trainer):
                    for array in parameter.list_data() if has_values(parameter) else ():
                        array.wait_to_read()
            self._store.check()
        self._has_updated = True

    def _read(self, step: Step) -> tuple:
        """The arguments of a step, of the batch as it is divided now."""
        self._reseed(step.number)
        return arguments_of(step)

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
        before, result = (lambda: None), NOTHING
        while True:
            try:
                before()
                if result is NOTHING:
                    given = self._inside(function)
                    if self._has_updated or not is_step:
                        self.progress.note_done(self._has_updated, given)
                    elif self._survives:  # nothing has waited for it yet, and the script must not get what a loss ends
                        for leaf in arrays_of(given):
                            leaf.wait_to_read()
                        self._store.check()
                    result = given
                return result
            except BaseException as error:
                is_loss = isinstance(error, Exception) and self._survives and has_failed(self._store)
                if self._has_updated or not is_loss:
                    if is_step:
                        self.progress.steps.clear()  # as DataParallel forgets what it has accumulated
                    raise
            others_result = self._regroup(is_step)
            result = result if others_result is NOTHING else others_result
            work = repeat if result is NOTHING else functools.partial(self._repeat, self.progress.steps)
            before = functools.partial(self._and_go_back, work)

    def _and_go_back(self, work: Callable[[], None]) -> None:
        """``work()`` that reads batches anew, after which the passes go on from where they were."""
        positions = [(each, each.number) for loader in self._loaders if (each := loader.under_way) is not None]
        work()
        for each, number in positions:
            if each.number != number:
                each.go_to(number)

    def _regroup(self, is_step: bool, meet: Optional[Callable[[], None]] = None) -> Any:
        return self._regrouper.regroup(is_step, self._undo, meet)

    def _undo(self) -> None:
        if self.progress.steps:
            self._put_back()

    def _between_steps(self, before: Callable[[], None]) -> None:
        """Between two batches of the first loader."""
        before()
        if self._joining is not None and not self.progress.steps and self.num_updates and not self._is_inside:
            self._joining.between_steps()

    def join(self) -> bool:
        """In a new process: wait for those that train, and go on where they are; returns whether it is one."""
        if self._joining is None or kvstore.joins() is None:
            return False
        self._joining.join()
        return True
