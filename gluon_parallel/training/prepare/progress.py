"""Progress of a loop, which its checkpoints hold: mean loss so far, counts, positions of its loaders."""

import functools
import math
import operator
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

from ... import launcher
from ...archive import described, refuse_differences
from ...environment import launched_group
from ...errors import LOG, CheckpointError
from ...mxnet.compat import mx
from ...mxnet.compat.array_types import as_legacy
from ..checkpoint import files

SECONDS_PER_LINE = 60.0  # of an epoch's progress, where there is no bar
_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix} [{elapsed}<{remaining}]"  # 80 columns have the postfix, at least
LAG = 8  # steps after which a loss is read: the engine works ahead, and one that went wrong is noticed soon


@functools.cache  # the end of `catch_warnings` has Python show warnings again that it shows once
def _kinds_of_bar() -> tuple[type, type]:
    """The class of a bar here, and that of a terminal's bar. The import takes 20 ms, which not all need."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said of notebooks without ipywidgets, which get a bar of characters
        from tqdm import tqdm
        from tqdm.autonotebook import tqdm as bar
    return bar, tqdm


class _Launcher:
    """The launcher's terminal, as a file that a bar is written to."""

    def write(self, text: str) -> None:
        launcher.send(launcher.BAR + text.strip())

    def flush(self) -> None:
        """Nothing: it is sent at once."""


class Bar:
    """How far an epoch is: a bar in a terminal or a notebook, elsewhere a line every minute.

    A launched process prints the lines, and its launcher shows the bar, if that has a terminal. What this package says
    meanwhile begins on a line of its own.

    Args:
        epoch: its number, counted from 1.
        done, total: how many steps of it; `total` is None where nobody knows.
        print_line: prints; None: nothing is shown.
    """

    def __init__(self, epoch: int = 0, done: int = 0, total: Optional[int] = None,
                 print_line: Optional[Callable[[str], None]] = None) -> None:  # fmt: skip
        kind, of_terminal = _kinds_of_bar()
        is_notebook = kind is not of_terminal
        is_terminal = sys.stderr is not None and sys.stderr.isatty()  # None: it was closed when Python began
        is_drawn = is_terminal or (is_notebook and launched_group() is None)
        of_launcher = {"file": _Launcher(), "mininterval": 0.5} if not is_drawn and launcher.is_heard() else {}
        self._bar = (of_terminal if of_launcher else kind)(
            desc=f"epoch {epoch}", total=total, initial=done, unit="step", leave=False,
            bar_format=None if total is None else _FORMAT,
            disable=print_line is None or not (is_drawn or of_launcher), **of_launcher,
            delay=0 if is_notebook else 1e-9,  # it begins with the first step's end, before which most warnings come
        )  # fmt: skip
        self._print = None if is_drawn else print_line
        self._epoch, self._done, self._total, self._shown = epoch, done, total, time.perf_counter()
        if is_terminal and not self._bar.disable:
            _drawn.add(self)

    def step(self, text: Callable[[], str]) -> None:
        """Count a step; ``text()``, which asks the learning rate schedule, is called where it is shown beside it."""
        self._done += 1
        if not self._bar.disable:
            self._bar.set_postfix_str(text(), refresh=False)
            self._bar.update()
        if self._print is not None and time.perf_counter() - self._shown > SECONDS_PER_LINE:
            self._shown = time.perf_counter()
            of_all = "" if self._total is None else f" of {self._total}"
            self._print(f"epoch {self._epoch}: step {self._done}{of_all}, {text()}")

    def clear(self) -> None:
        """Make room for a line; the next step shows the bar again."""
        if not self._bar.disable:
            self._bar.clear()

    def close(self) -> None:
        """Remove it."""
        _drawn.discard(self)
        self._bar.close()


_drawn: weakref.WeakSet[Bar] = weakref.WeakSet()  # on a terminal


def _make_room(_record: Any) -> bool:
    for bar in [*_drawn]:
        bar.clear()
    return True


LOG.addFilter(_make_room)


class Later:
    """Functions that read what steps compute; each is called `lag` steps later, so that nobody waits for the engine."""

    def __init__(self, lag: int) -> None:
        self._lag, self._num_steps = lag, 0
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()

    def add(self, read: Callable[[], None]) -> None:
        """Call ``read()`` when `lag` more steps have been made, behind what was added before."""
        self._waiting.append((self._num_steps, read))

    def add_step(self, read: Callable[[], None]) -> None:
        """As :meth:`add`, for a further step; calls what is due."""
        self._num_steps += 1
        self._waiting.append((self._num_steps, read))
        while self._waiting and self._waiting[0][0] <= self._num_steps - self._lag:
            self._waiting.popleft()[1]()

    def settle(self) -> None:
        """Call all that wait."""
        while self._waiting:
            self._waiting.popleft()[1]()


class Sums(NamedTuple):
    """What steps of one process, or of all, add up to."""

    rate: float  # samples per second
    num_samples: int
    losses: dict[str, float]  # by name: "loss" and its parts; each a mean times its number of samples

    def means(self) -> dict[str, float]:
        """The mean loss and that of each of its parts, as a log names them; NaN without samples."""
        names = {name: name if name == "loss" else f"loss_{name}" for name in self.losses}
        num = self.num_samples
        return {names[name]: one / num if num else math.nan for name, one in self.losses.items()}


class Losses:
    """Sums of an epoch's losses so far: of this process's steps, and in process 0 those that a checkpoint held of all.

    Args:
        refuse: a function of a step and its loss, NaN or infinite, which raises.
        sums, num_samples: sums of the losses before, by name: "loss" and its parts; over how many samples.

    Attributes:
        later: reads the losses, and what else the log has of single steps.
    """

    def __init__(
        self, refuse: Callable[[int, float], None], sums: Optional[Mapping[str, float]] = None, num_samples: int = 0
    ) -> None:
        self.sums, self.num_samples, self.later = dict(sums or {"loss": 0.0}), num_samples, Later(LAG)
        self._refuse = refuse
        self._samples_here = 0  # since the clock was started
        self.start_clock()

    def start_clock(self) -> None:
        """Count time from here, so that rates leave out what was before, such as the building of the net."""
        self._begin = self._end = time.perf_counter()
        self._lap = dict(self.sums), self.num_samples, self._begin, self._begin

    def add(self, step: int, loss: Any, num_samples: int, parts: Optional[Mapping[str, Any]] = None) -> None:
        """Note a step's mean loss, an array of one value, and the mean of each of its parts."""
        self._samples_here += num_samples
        self.later.add_step(functools.partial(self._read, step, loss, num_samples, parts or {}))

    def settle(self) -> None:
        """Wait for every loss that was added, and read it."""
        self.later.settle()

    def all(self) -> Sums:
        """Of all steps that were read; the rate is that until the last one was."""
        return Sums(self._samples_here / max(self._end - self._begin, 1e-9), self.num_samples, self.sums)

    def lap(self, made_at: float) -> Sums:
        """Of the steps that were read since the last lap, or since the clock was started.

        Args:
            made_at: when the last of them was made, by ``time.perf_counter()``. The script may make several before the
                first is computed, and several may be read at once: the longer time counts.
        """
        (sums, num, made_before, read_before), read_at = self._lap, time.perf_counter()
        self._lap = dict(self.sums), self.num_samples, made_at, read_at
        num, seconds = self.num_samples - num, max(made_at - made_before, read_at - read_before, 1e-9)
        return Sums(num / seconds, num, {key: one - sums.get(key, 0.0) for key, one in self.sums.items()})

    def so_far(self, trainer: Optional[mx.gluon.Trainer]) -> str:
        """The mean loss, the learning rate and the samples per second; empty before the first loss is read."""
        if not self.num_samples:
            return ""
        rate = self._samples_here / (time.perf_counter() - self._begin)
        learning_rate = "" if trainer is None else f"lr {trainer.learning_rate:.3g}, "
        return f"loss {self.sums['loss'] / self.num_samples:.4f}, {learning_rate}{rate:.0f} samples/s"

    def _read(self, step: int, loss: Any, num_samples: int, parts: Mapping[str, Any]) -> None:
        value = loss.asnumpy().item()
        if not math.isfinite(value):
            self._refuse(step, value)
        self.num_samples, self._end = self.num_samples + num_samples, time.perf_counter()
        for name, mean in {"loss": value, **{name: part.asnumpy().item() for name, part in parts.items()}}.items():
            self.sums[name] = self.sums.get(name, 0.0) + mean * num_samples


def sort_saved(saved: Optional[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Sequence[Any]]]:
    """What a loop was given to save, by name: objects with a state, and arrays, each as a list of its copies."""
    saved = dict(saved or {})
    objects = {name: value for name, value in saved.items() if isinstance(value, files.Stateful)}
    arrays = {name: value for name, value in saved.items() if name not in objects}
    arrays = {name: one if isinstance(one, (list, tuple)) else [one] for name, one in arrays.items()}
    for name, copies in arrays.items():
        if not all(isinstance(copy, mx.nd.NDArray) for copy in copies):
            raise CheckpointError(f"saved: {name} is {copies}, expected an object with state() or arrays")
    return objects, arrays


# Attributes of a loop by their names in files
_COUNTS = {"epoch": "epoch", "step": "step_in_epoch", "steps": "num_steps", "best": "best", "best_epoch": "best_epoch",
           "epochs_since_best": "epochs_since_best"}  # fmt: skip


def write(loop: Any, path: Path) -> None:
    """Write a :class:`.Loop` with its net and trainer, after all its losses have been read."""
    there = {key: getattr(loop, name) for key, name in _COUNTS.items()}
    there["loaders"] = [[*loader.position, operator.length_hint(loader)] for loader in loop.loaders]
    there.update(seed=loop._seed, sums=loop._losses.sums, num_samples=loop._losses.num_samples)
    there["metrics"] = loop._sums_of_metrics() if loop.step_in_epoch else {}
    own = {**loop._objects, **{name: copies[0] for name, copies in loop._arrays.items()}}
    files.write(path, loop.net, loop.trainer, own, there, loop.is_main)


def content(loop: Any) -> dict[str, Any]:
    """What a process that joins gets of a :class:`.Loop`, beside its net, trainer and the positions of its loaders.

    All losses are read: what the log has of a step is summed over the processes that have made it.
    """
    loop._settle()
    return {
        "losses": list(loop._losses.sums),
        "counts": {name: getattr(loop, name) for name in _COUNTS.values()},
        "objects": {name: value.state() for name, value in loop._objects.items()},
        "arrays": {name: copies[0].asnumpy() for name, copies in loop._arrays.items()},
        "folder": str(loop.run.folder) if loop.run else "",
    }


def take(loop: Any, content: Mapping[str, Any]) -> None:
    """Go on from the :func:`content` of another process."""
    own, others = {*loop._objects, *loop._arrays}, {*content["objects"], *content["arrays"]}
    if own != others:
        raise CheckpointError(f"saved= has {sorted(own)} here, and {sorted(others)} in the processes that it joins")
    for name, found in content["objects"].items():
        loop._objects[name].restore(found, "the process that sent it")
    for name, array in content["arrays"].items():
        _fill(loop._arrays[name], array)
    for name, value in content["counts"].items():
        setattr(loop, name, value)
    loop._losses = Losses(loop._refuse, dict.fromkeys(content["losses"], 0.0))


def _fill(copies: Sequence[Any], array: Any) -> None:
    for copy in copies:
        as_legacy(copy)[:] = mx.nd.array(array, dtype=array.dtype)


def resume(loop: Any) -> None:
    """Continue from the newest checkpoint of the loop's run, if there is one; CheckpointError: of another training."""
    # The first one need not exist: every process reads some path, so that all hear what process 0 has found.
    checkpoints: list[Path] = [loop.run.folder / "epoch-0000.npz", *loop.run.checkpoints()]
    *older, path = checkpoints
    try:
        found = files.read(path, loop._meeting, may_be_missing=True)
    except CheckpointError as error:
        hint = f". Without it, training continues from the one before, {older[-1]}" if older[1:] else ""
        raise CheckpointError(f"{error}{hint}") from error
    if found is None:
        return
    there = found.facts.get("loop")
    if there is None or len(there["loaders"]) != len(loop.loaders) or there["seed"] != loop._seed:
        raise CheckpointError(
            f"{path} was not saved by this training: it has another seed or other loaders, or gp.checkpoint.save "
            "wrote it. Name another folder for the run, or load it with gp.checkpoint.load"
        )
    own = files.arrays_of(found)
    wanted = {name: described(copies[0]) for name, copies in loop._arrays.items()}
    saved = {name: [own[name]] for name in wanted if name in own}
    refuse_differences(wanted, saved, f"{path} has other arrays", "Save and load the same, by the same names")
    for loader, (_, start, num_batches) in zip(loop.loaders, there["loaders"]):
        if start and num_batches != operator.length_hint(loader):
            raise CheckpointError(
                f"{path} is of the middle of an epoch, after {start} of {num_batches} batches; now the loader has "
                f"{operator.length_hint(loader)}, so samples would be left out or read twice. Continue with the "
                "same batch size and data, or from a checkpoint between two epochs"
            )
    files.put(found, loop.net, loop.trainer, loop._objects, str(path))
    for name, copies in loop._arrays.items():
        _fill(copies, own[name])
    for key, name in _COUNTS.items():
        setattr(loop, name, there[key])
    for loader, (epoch, start, _) in zip(loop.loaders, there["loaders"]):
        loader.set_epoch(epoch, start)
    sums, num = there["sums"], there["num_samples"]  # of all processes, so only process 0 goes on with them
    loop._losses = Losses(loop._refuse, *(sums, num) if loop.is_main else (dict.fromkeys(sums, 0.0), 0))
    loop._saved_metrics = there.get("metrics", {}) if loop.is_main else {}
    loop.print(f"continuing {path}")
