"""Loop: what a training loop needs to stop anywhere and continue bit for bit, whatever its steps are."""

import contextlib
import math
import numbers
import operator
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np

from ... import kvstore
from ...errors import LOG, BatchMismatch, GluonParallelError, NotFinite
from ...kvstore import collective
from ...kvstore.collective import gather, gather_objects
from ...kvstore.contract import contract
from ...mxnet.compat import mx
from ...mxnet.parameters import waits_for_shape
from ...mxnet.trainers import has_made_store
from ...step.first_step import broadcast_others
from .. import stopping
from ..checkpoint.optimizer import is_divided
from ..run import BEST, Run
from ..seeding import reseed
from . import progress
from .loaders import shard_loader
from .progress import Bar, Losses, Sums
from .step_log import StepLog


class Loop:
    """A training loop's position, random numbers, mean loss, stopping and checkpoints; the steps are the caller's.

    ``gp.prepare`` returns one that makes the steps too, :class:`.Training`. Every process makes one and calls the same.

    Args:
        loaders: as of ``gp.prepare``; the first one's passes are the epochs of training. ``loop.loaders`` has this
            process's part of each.
        net, trainer: what is saved, see ``gp.checkpoint.save``; both may be left out.
        store: the KVStore through which processes meet; None: this process is alone.
        seed: of the order of the samples and of the random numbers of every step.
        run: a :class:`.Run` or its folder, whose newest checkpoint the loop continues from; None: nothing is saved.
        saved: what else belongs into checkpoints, by name: objects with a state, such as
            :class:`.ExponentialMovingAverage`; arrays; lists of one array's copies on several devices.
        accumulate: steps that make one update; Ctrl-C waits for the last of them.
        batch_axis: the axis that counts samples, for batches with fewer samples than there are processes.

    Attributes:
        epoch, step_in_epoch, num_steps: how many epochs, steps of the next one, and steps of all are complete.
        row: what :meth:`end_epoch` returned last; empty before.
        best, best_epoch, epochs_since_best: the highest score of :meth:`end_epoch` so far, its epoch, counted from 1,
            and how many epochs have had a score since.

    Example:
        >>> weight = mx.nd.zeros(1)
        >>> loop = Loop([1.0, 2.0, 6.0], saved={"weight": weight})
        >>> for epoch in loop.epochs(2):  # doctest: +ELLIPSIS
        ...     for number in loop.loaders[0]:
        ...         weight += number
        ...         loop.add(mx.nd.array([number]), num_samples=4)
        ...     row = loop.end_epoch(weight=weight.asscalar())
        epoch      loss     weight  samples/s
            1    3.0000          9 ...
            2    3.0000         18 ...
    """

    def __init__(self, *loaders: Any, net: Optional[mx.gluon.Block] = None, trainer: Optional[mx.gluon.Trainer] = None,
                 store: Any = None, seed: int = 0, run: Any = None, saved: Optional[Mapping[str, Any]] = None,
                 accumulate: int = 1, batch_axis: int = 0) -> None:  # fmt: skip
        self.store = kvstore.create("local") if store is None else store
        # Processes over dist_async do not wait for each other, for a mean neither.
        self._meeting = kvstore.create("local") if contract(self.store).is_asynchronous else self.store
        self.net, self.trainer, self.run = net, trainer, run if isinstance(run, Run) else Run(run)
        place = self.rank, self.store.num_workers
        self.loaders = [shard_loader(loader, *place, seed, batch_axis) for loader in loaders]
        if self.run and any(loader.is_rollover for loader in self.loaders):
            raise TypeError(
                "run: what a DataLoader with last_batch='rollover' keeps for its next pass is in none of its "
                "checkpoints. Write last_batch='keep' or 'discard', or leave out the run"
            )
        if self.loaders:
            self.loaders[0].between, self.loaders[0].at_end = self._between_steps, self._end_pass
        for loader in self.loaders:
            loader.reseed = self._reseed_in_epoch
        self.epoch = self.step_in_epoch = self.num_steps = self.best_epoch = self.epochs_since_best = 0
        self.best: Optional[float] = None
        self.row: dict[str, float] = {}
        self._seed, self._accumulate = seed, accumulate
        self._objects, self._arrays = progress.sort_saved(saved)
        # Where the others go on without one that stops, all stop together only if each has a part of what is saved.
        self._only_main_stops = kvstore.repeats(self.store) and (trainer is None or not is_divided(trainer))
        meets = self._meeting.num_workers > 1 and not self._only_main_stops
        self._agreed_stop = stopping.AgreedStop(self._meeting, trainer) if self.run and meets else None
        self._share_net()
        self._make_survival()
        self._lock = threading.RLock()  # devices that do not wait for each other count from threads of their own
        self._bar = Bar()
        self._losses = Losses(self._refuse)
        self._step_log, self._log_every = StepLog(self) if self.run else None, self.run.log_every or math.inf
        self._leaves_alone = False  # while this process saves and stops without the others
        self._saved_metrics: Mapping[str, Sequence[float]] = {}  # of the epoch that a checkpoint is in the middle of
        self._on_step: list[Callable[[Any], Any]] = []
        self._on_epoch: list[Callable[[Any], Any]] = []
        if not self._joins():
            if self.run:
                with collective("gp.prepare()"):
                    progress.resume(self)
            self._begin_run()
            if self.run and kvstore.repeats(self.store):  # another process may have to write there
                self.run.share(kvstore.together(self.store, self._folder_of_run))
        self._reseed()

    def _share_net(self) -> None:
        """Give all processes process 0's values of what a trainer that has not begun does not hold."""
        if self.net is not None and self.trainer is not None and not has_made_store(self.trainer):
            broadcast_others(self.net, self.trainer, self._meeting)

    @property
    def rank(self) -> int:
        """The number of this process; it may become another one when :attr:`store` has other processes."""
        return self.store.rank

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, which prints and writes."""
        return self.store.rank == 0

    def __repr__(self) -> str:
        return f"{self.store.num_workers} process{'es' * (self.store.num_workers > 1)}"

    def print(self, *values: Any) -> None:
        """Print on process 0."""
        if self.is_main:
            self._bar.clear()
            print(*values, flush=True)

    def epochs(self, num: int, patience: Optional[int] = None, progress: bool = True) -> Iterator[int]:
        """Number the epochs from that which comes next to `num` - 1; where there is a run, Ctrl-C saves and exits.

        So do SIGTERM and SIGHUP. Of several processes, all stop after the same step when one of them is asked to.

        It calls :meth:`end_epoch` where the loop has not. At the end, the run's curves are drawn.

        Args:
            num: epochs in all, those before a checkpoint that was resumed included.
            patience: end after so many epochs with a score that is not better; every process must know the score.
            progress: show, on process 0, the steps of the epoch with its mean loss, the learning rate and the samples
                per second: a bar in a terminal or a notebook, elsewhere a line every minute.

        Raises:
            Stopped: the exit after Ctrl-C, SIGTERM or SIGHUP, with a checkpoint that continues behind the last step.
        """
        postponed = stopping.postponed(lambda: self.is_main, self._only_main_stops)
        with postponed if self.run else contextlib.nullcontext():
            while self.epoch < num and not (patience and self.epochs_since_best >= patience):
                epoch = self.epoch
                self._reseed()
                total = operator.length_hint(self.loaders[0]) or None if self.loaders else None
                shown = self.print if progress and self.is_main else None
                self._bar = Bar(epoch + 1, self.step_in_epoch, total, shown)
                self._losses.start_clock()
                yield epoch
                if self.epoch == epoch:
                    self.end_epoch()
                if patience == self.epoch and self.best is None and not self.epochs_since_best and self.is_main:
                    said = f"patience={patience}: no epoch has had a score; call end_epoch(score=...)"
                    LOG.warning(f"gluon_parallel: {said}")
        if self.epoch < num:
            self.print(f"no better score in {self.epochs_since_best} epochs; the best one is {self.best}")
        self._settle()
        self._begin_run()
        if self.run and self.is_main and self.epoch > 0:
            print(f"checkpoint: {self.run.checkpoints()[-1]}")
            if self.best is not None:
                print(f"best:       {self.run.folder / BEST}, of epoch {self.best_epoch}, score {self.best:.6g}")
            print(f"curves:     {self.run.finish()}", flush=True)

    def add(self, loss: mx.nd.NDArray, num_samples: int, parts: Optional[Mapping[str, mx.nd.NDArray]] = None) -> None:
        """Count a step, and start the next one's random numbers.

        So that the engine can work ahead, each loss is waited for when eight younger ones have been added.

        Args:
            loss: its mean loss over `num_samples` samples, an array of one value or a number.
            parts: what the loss is the sum of, by name, as ``DataParallel.parts`` has it.

        Raises:
            NotFinite: the loss of this step or of one of the eight before it is NaN or infinite; names the step.
            Stopped: see :meth:`epochs`; without a loader, whose next batch is its time otherwise.
        """
        self.count(loss, num_samples, parts)
        if self._on_step:
            self._call(self._on_step, "on_step", f"epoch {self.epoch + 1}, step {self.step_in_epoch}")
        self._reseed()
        if not self.loaders:
            self._between_steps()

    def count(self, loss: mx.nd.NDArray, num_samples: int, parts: Optional[Mapping[str, Any]] = None) -> None:
        """Only count a step; for devices that do not wait for each other, from whichever thread."""
        if isinstance(loss, numbers.Real):
            loss = mx.nd.array([loss], dtype="float64")
        if not hasattr(loss, "asnumpy") or getattr(loss, "size", 1) != 1:
            what = f"of shape {loss.shape}" if hasattr(loss, "shape") else f"of type {type(loss).__name__}"
            raise BatchMismatch(f"loop.add: the loss is {what}, expected one value; of a loss per sample: loss.mean()")
        with self._lock:
            self.num_steps += 1
            self.step_in_epoch += 1
            self._losses.add(self.step_in_epoch, loss, num_samples, parts)
            if self.num_steps % self._log_every == 0 and self._step_log is not None:
                self._step_log.end_step(self._values_of_step())
            self._bar.step(lambda: self._losses.so_far(self.trainer))

    @property
    def stop_requested(self) -> bool:
        """Whether Ctrl-C was pressed (or SIGTERM or SIGHUP came) while there is a run to save."""
        return bool(self.run) and (self.is_main or not self._only_main_stops) and stopping.requested() is not None

    def _between_steps(self) -> None:
        # Devices that do not wait for each other take batches in threads of their own.
        if self.step_in_epoch % self._accumulate == 0 and threading.current_thread() is threading.main_thread():
            self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """Save to the run and exit, if :attr:`stop_requested`; called between batches and in :meth:`end_epoch`."""
        number = stopping.requested() if self.stop_requested else None
        if self._agreed_stop is not None:
            number = self._agreed_stop.asked(number)
        if number is None:
            return
        self._begin_run()
        where = f"after epoch {self.epoch}"
        self._leaves_alone = self._agreed_stop is None and self._meeting.num_workers > 1
        if self.step_in_epoch:
            if self._agreed_stop is not None:  # else process 0 has those of its own samples
                _, self._losses.num_samples, self._losses.sums = self._sums_of_all()
            self.run.keep(self._write, self.epoch, self.step_in_epoch)
            where = f"in epoch {self.epoch + 1}, after step {self.step_in_epoch}"
        if self._agreed_stop is not None:  # mpirun and srun end all when the first one has left
            gather(self._meeting, "training.epochs()", np.zeros(1))
        self._bar.close()
        if self.is_main:
            path = self.run.checkpoints()[-1]
            print(f"stopped {where}; {path} has everything. {self.run.advice}", file=sys.stderr)
        raise stopping.Stopped(128 + number)

    @collective("training.end_epoch()")
    def end_epoch(self, score: Optional[float] = None, **measured: float) -> dict[str, float]:
        """Log the epoch's numbers and save to the run; every process must call it.

        Args:
            score: the higher, the better; the run keeps the best epoch's checkpoint. NaN is none.
            measured: what else is logged, such as ``test_accuracy=0.97``.

        Returns:
            The row that process 0 prints: the epoch, counted from 1, the mean loss over the samples of all processes
            and that of each part, what was measured, and the samples per second.

        Raises:
            BatchMismatch: no step of the epoch had a sample, though there is a loader.
            NotFinite, OutputUnavailable: see :meth:`.Run.keep`.
            Stopped: see :meth:`epochs`.
        """
        for name, value in {"score": score, **measured}.items():
            if not isinstance(value, numbers.Real) and (name, value) != ("score", None):
                raise TypeError(
                    f"end_epoch: {name} is a {type(value).__name__}, expected a number; of an evaluation write "
                    "[(_, accuracy)] = training.evaluate(test, 'acc'), of an array value.asscalar()"
                )
        self._finish_updates()
        found = self._sums_of_all()
        if self.loaders and not found.num_samples:
            raise BatchMismatch(
                f"epoch {self.epoch + 1} had no step with samples: the loader yielded no batch, as a generator after "
                "its first pass (hand over a list or a DataLoader), or training.step was not called"
            )
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        row = {
            "epoch": self.epoch,
            **found.means(),
            **self._take_metrics(),
            **measured,
            "samples_per_second": found.rate,
        }
        if kvstore.may_join():  # then it is not the same in each epoch
            row["processes"] = self.store.num_workers
        is_best = score is not None and not math.isnan(score) and (self.best is None or score > self.best)
        self.best, self.best_epoch = (score, self.epoch) if is_best else (self.best, self.best_epoch)
        self.epochs_since_best = 0 if is_best else self.epochs_since_best + (score is not None)
        self._losses = Losses(self._refuse)
        self._bar.close()
        self.row = row
        self._record(row, is_best)
        if self._on_epoch:
            self._call(self._on_epoch, "on_epoch", f"epoch {self.epoch}")
        self.stop_if_asked()
        return row

    def _record(self, row: Mapping[str, float], is_best: bool) -> None:
        """Log an epoch's numbers and save to the run."""
        is_recorded = False

        def record() -> None:
            nonlocal is_recorded
            self._begin_run()  # another process may have written
            if not is_recorded:
                if not self.run.rows or self.run.rows[-1]["epoch"] < row["epoch"]:  # else another process has
                    self.run.log(**row)
                if self.run:
                    self.run.keep(self._write, self.epoch, is_best=is_best)
            is_recorded = self.is_main

        kvstore.together(self.store, record)

    def log(self, **values: Any) -> None:
        """Log values of the last step, by name: numbers, or arrays of one value, which nobody waits for.

        They are read some steps later, and become one row of the run's ``metrics.jsonl``, with the step's number as
        counted over all epochs: ``{"step": 50, "epoch": 1, "loss": 0.7, ...}``. Of several processes, those of process
        0 are written, so it may be called there alone; without a run, nothing is.

        Every ``gp.Run(folder, log_every=50)`` steps, such a row has by itself: ``loss``, and each part of it, the mean
        over the samples of all processes since the row before, or since the epoch began; ``samples_per_second``, of all
        processes, in the same time; ``learning_rate``; and with `clip_global_norm` ``gradient_norm``, see
        ``DataParallel.gradient_norm``. A value of yours by one of these names replaces it.

        Raises:
            TypeError: a value is no number and no array of one value.
        """
        for name, value in values.items():
            if not isinstance(value, numbers.Real) and (not hasattr(value, "copy") or getattr(value, "size", 0) != 1):
                what = f"an array of shape {value.shape}" if hasattr(value, "shape") else f"a {type(value).__name__}"
                raise TypeError(
                    f"log: {name} is {what}, expected a number or an array of one value, such as its mean()"
                )
        if self._step_log is not None and self.is_main:
            with self._lock:
                self._step_log.add(values)

    def on_step(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Call ``function(training)`` after each step from now on, on every process; returns it, to decorate it.

        An exception in it ends the run as a RuntimeError that names it. It may log, print, evaluate, or ask to stop by
        ``signal.raise_signal(signal.SIGTERM)``, see :meth:`epochs`; random numbers that it draws change no step.
        """
        self._on_step.append(function)
        return function

    def on_epoch(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Call ``function(training)`` at the end of :meth:`end_epoch`, with :attr:`row`; else as :meth:`on_step`."""
        self._on_epoch.append(function)
        return function

    def _call(self, functions: Sequence[Callable[[Any], Any]], hook: str, where: str) -> None:
        """Call functions of the user's."""
        for function in functions:
            try:
                function(self)
            except Exception as error:
                self._bar.close()
                place = f"training.{hook}({getattr(function, '__qualname__', repr(function))}), {where}"
                if not isinstance(error, GluonParallelError):
                    raise RuntimeError(f"{place}: {type(error).__name__}: {error}") from error
                error.args = (f"{place}: {error}",)
                raise

    @collective("training.mean_loss()")
    def mean_loss(self) -> float:
        """The mean loss over all samples of all processes since the last call; every process must call it."""
        loss = self._sums_of_all().means()["loss"]
        self._losses = Losses(self._refuse)
        return loss

    def _begin_run(self) -> None:
        """Make the run's folder, if this is the process that writes there."""
        self.run.begin(self.is_main, self.num_steps)

    def _values_of_step(self) -> dict[str, Any]:
        """What the log has by itself of the last step, beside its loss: numbers, and arrays of one value."""
        return {} if self.trainer is None else {"learning_rate": self.trainer.learning_rate}

    def _take_metrics(self) -> dict[str, float]:
        """What was measured of the epoch's steps, beside their loss."""
        return {}

    def _sums_of_metrics(self) -> dict[str, list[float]]:
        """The same for a checkpoint within the epoch."""
        return {}

    def _over_processes(self, own: Sums) -> Sums:
        """The sums of those of all processes, which all call it."""
        values = np.array([own.rate, own.num_samples, *own.losses.values()], np.float64)
        rows = kvstore.together(self.store, lambda: gather(self._meeting, "training.mean_loss()", values))
        rate, num, *sums = rows.sum(axis=0).tolist()
        return Sums(rate, int(num), dict(zip(own.losses, sums)))

    def _write(self, path: Path) -> None:
        self._settle()
        progress.write(self, path)

    def _make_survival(self) -> None:
        """Repeat steps that break off from here on; where they are the caller's, ``gp.survive`` does it."""
        if kvstore.may_join():
            raise ValueError(
                "gp.Loop: no process can join this training, whose steps are the caller's (a pipeline, an "
                "asynchronous one). Train with gp.prepare, or leave out --max-processes of the launcher"
            )

    def _joins(self) -> bool:
        """Whether this process has joined a training under way, and begins where that is."""
        return False

    def content(self) -> dict[str, Any]:
        """What a process that joins begins with beside net, trainer and the positions of loaders."""
        self._settle()  # the rows of steps that it has not made are not for it to sum up with the others
        return progress.content(self)

    def take(self, content: Mapping[str, Any]) -> None:
        """Go on from what :meth:`content` has returned in another process."""
        progress.take(self, content)
        if self.run:
            self.run.share(content["folder"])
        self._begin_run()

    def _folder_of_run(self) -> str:
        self._begin_run()
        return gather_objects(str(self.run.folder), self.store, "gp.prepare()")[0]

    def _finish_updates(self) -> None:
        """Update with what is accumulated, which is in no file."""

    def _end_pass(self) -> None:
        """Read all losses and make the last update, so that what follows a pass measures the weights that are saved."""
        self._settle()
        self._finish_updates()

    def _reseed(self, number: Optional[int] = None) -> None:
        """Random numbers of a step, by default the next one, and of what reads its batch, follow from its number."""
        step = self.num_steps if number is None else number
        parameters = self.net.collect_params().values() if self.net is not None and step == 0 else ()
        draws_weights = any(waits_for_shape(parameter) for parameter in parameters)  # whose shapes come from this step
        # Weights are the same on all processes, should process 0 not send its own.
        reseed(self._seed + (0 if draws_weights else self.rank), 1, step)

    def _reseed_in_epoch(self, number: int) -> None:
        """The same for that step of the epoch under way."""
        self._reseed(self.num_steps - self.step_in_epoch + number)

    def _refuse(self, step: int, loss: float) -> None:
        self._bar.close()
        raise NotFinite(
            f"epoch {self.epoch + 1}, step {step}: the loss is {loss}. {self.run.last()}. A smaller learning rate is "
            "the usual remedy; the other cause is NaN in the data: look for it by np.isfinite(images).all()"
        )

    def _settle(self) -> None:
        """Wait for every loss that was added, and read it; NotFinite: one of them is NaN or infinite."""
        with self._lock:
            self._losses.settle()

    def _sums_of_all(self) -> Sums:
        """Those of the losses of all processes."""
        self._settle()
        return self._over_processes(self._losses.all())
