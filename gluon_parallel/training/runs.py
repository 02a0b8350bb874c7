"""Runs: each has a numbered folder of its own, in which it can be stopped and continued.

``runs/lenet/default/1`` holds ``config.yaml``, ``metrics.jsonl``, ``curves.png`` and the checkpoints: the two newest,
``epoch-0007.npz`` (or ``epoch-0007-step-00042.npz`` of a run that was stopped within an epoch), and ``best.npz``.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import threading
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from .. import archive
from ..archive import Archive
from ..errors import CheckpointError, NotFinite, OutputUnavailable
from .progress import Position, Progress
from .report import Report

KEEP = 2  # newest checkpoints; the one before the last is there for when the last one's disk fails
_NAME = re.compile(r"epoch-\d+(-step-\d+)?\.npz")


class Stopped(KeyboardInterrupt):
    """Ctrl-C (or SIGTERM) was asked for, and a checkpoint was written; `exit_code` is what the shell expects."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; ``best.npz`` is not among them."""
    found = [path for path in folder.glob("epoch-*.npz") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: list(map(int, re.findall(r"\d+", path.name))))


def _numbered(parent: Path) -> list[Path]:
    """The folders of the runs in `parent`, oldest first."""
    folders = [path for path in parent.glob("*") if path.name.isdigit() and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name))


def find(parent: Path, resume: str) -> Path:
    """The folder of the run to continue: with ``newest``, the newest one in `parent` that has a checkpoint.

    CheckpointError: there is nothing to continue.
    """
    candidates = _numbered(parent) if resume == "newest" else [Path(resume)]
    for folder in reversed(candidates):
        if checkpoints(folder) and (folder / "config.yaml").exists():
            return folder
    where = parent if resume == "newest" else resume
    raise CheckpointError(
        f"--resume: there is no run with a checkpoint in {where}. Leave --resume out to begin one, or name the folder "
        "of a run, such as --resume runs/lenet/default/1"
    )


def begin(parent: Path, option: str = "--output") -> Path:
    """Make the folder of a new run, with the number after the last one's; an error names the option for another."""
    with writable(parent, option):
        parent.mkdir(parents=True, exist_ok=True)
        number = int(_numbered(parent)[-1].name) + 1 if _numbered(parent) else 1
        while True:
            folder = parent / str(number)
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # another run began at this moment
                number += 1


@contextlib.contextmanager
def writable(folder: Path, option: str = "--output") -> Iterator[None]:
    """Within this block, what the system refuses is raised as OutputUnavailable, which names the option."""
    try:
        yield
    except OSError as error:
        raise OutputUnavailable(
            f"the output folder {folder} cannot be written to: {error.strerror or error}. Choose another: {option} "
            "FOLDER"
        ) from error


@contextlib.contextmanager
def signals_handled(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Within this block, each of these signals calls its function of (number, frame)."""
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals nowhere else
        handlers = {}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Run:
    """A training run: where it is, what is kept of it, and whether it was asked to stop.

    As a context manager it makes Ctrl-C and SIGTERM wait, once training has begun, for the next :meth:`save`; a second
    Ctrl-C stops at once.

    Args:
        folder: what :func:`begin` made or :func:`find` found.
        config_yaml: the run's config, kept beside its results.
        title: of the picture of the curves.
        tensorboard: whether to write TensorBoard event files.
        resumed: continue from the folder's newest checkpoint.
        store: the KVStore through which this process meets others; process 0 alone writes and listens to Ctrl-C.

    Raises:
        OutputUnavailable: the folder cannot be written to.
        CheckpointError: the newest checkpoint is damaged; the message names the one before it.
    """

    def __init__(
        self,
        folder: Path,
        config_yaml: str,
        title: str = "",
        tensorboard: bool = False,
        resumed: bool = False,
        store: Any = None,
    ) -> None:
        self.folder, self.title, self.store = folder, title, store
        self.writes = store is None or store.rank == 0
        # Where the run starts: at its beginning, or where it was stopped.
        self.position, self.state, self.best = Position(), None, None
        if resumed:
            self.position, self.state, self.best = _load(folder)
        self.report: Any = types.SimpleNamespace(add=lambda **row: None, close=lambda: None)  # process 0 alone reports
        if self.writes:
            with writable(folder):
                archive.replace(folder / "config.yaml", lambda file: file.write(config_yaml.encode()))
                self.report = Report(folder, tensorboard, until_epoch=self.position.epoch)
        self.interrupted: Optional[int] = None  # the signal that came to a process other than 0, which goes on
        self._signal: Optional[int] = None
        self._training = False
        self._handled = contextlib.ExitStack()

    def __enter__(self) -> Run:
        handlers: dict[int, Any] = {signal.SIGINT: self._on_signal, signal.SIGTERM: self._on_signal}
        if not self.writes:  # process 0 saves after a step of all, so the others go on until they are ended
            handlers = {signal.SIGINT: self._leave_it_to_process_0}
        self._handled.enter_context(signals_handled(handlers))
        return self

    def __exit__(self, _kind: Any, exception: Any, _traceback: Any) -> None:
        self._handled.close()
        self.report.close()
        if exception is not None and self.writes and not self._training and not checkpoints(self.folder):
            # It failed before it began, for a misspelt data set perhaps: no numbered folder for that.
            for name in ("config.yaml", "metrics.jsonl"):
                (self.folder / name).unlink()
            with contextlib.suppress(OSError):  # the script has put something there itself
                self.folder.rmdir()

    def _on_signal(self, number: int, _frame: Any) -> None:
        if not self._training or self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number
        # Not print(): the signal may have come in the middle of one, and a second one is refused then.
        os.write(2, b"\nStopping after this step; once more stops at once.\n")

    def _leave_it_to_process_0(self, number: int, _frame: Any) -> None:
        self.interrupted = number

    @property
    def stop_requested(self) -> bool:
        """Whether Ctrl-C was pressed (or SIGTERM came); the next :meth:`save` then ends the run."""
        return self._signal is not None

    def tell(self, text: str) -> None:
        """Print a line on process 0."""
        if self.writes:
            print(text, flush=True)

    def progress(self, batches: Iterable[Any], epoch: int) -> Progress:
        """Iterate over the batches of an epoch with a bar; a resumed epoch counts on from where it was stopped."""
        self._training = True
        position = self.position if epoch == self.position.epoch else Position(epoch)
        return Progress(batches, f"epoch {epoch + 1}", position, self.saved)

    def saved(self) -> str:
        """Which checkpoint there is, as a sentence without its full stop."""
        there = checkpoints(self.folder)
        return f"The last good checkpoint is {there[-1]}" if there else "No checkpoint has been saved yet"

    def where(self, devices: Sequence[Any]) -> str:
        """Where the run trains, for its first line: the devices, or how many processes of how many devices."""
        num_workers = 1 if self.store is None else self.store.num_workers
        if num_workers == 1:
            return str(list(devices))
        return f"{num_workers} processes x {len(devices)} device{'s' if len(devices) > 1 else ''}"

    def save(
        self, state: Archive, epoch: int, within: Optional[Progress] = None, score: Optional[float] = None
    ) -> Path:
        """Write a checkpoint; if stopping was asked for, leave.

        Args:
            state: what to keep.
            epoch: complete epochs.
            within: the progress of the next epoch, if the run is in the middle of one.
            score: the higher, the better; the best checkpoint is kept as ``best.npz``. NaN is none.

        Returns:
            The checkpoint's file, which process 0 has written.

        Raises:
            NotFinite: a loss or an array is NaN or infinite; the last good checkpoint stays.
            OutputUnavailable: the file cannot be written, for the disk is full for instance; older ones are as before.
            Stopped: after a request to stop, once the checkpoint is on the disk.
        """
        position, name = Position(epoch), f"epoch-{epoch:04d}.npz"
        if within is not None:
            within.settle()
            position = Position(epoch, within.step, within.loss_sum, within.num_samples, within.part_sums)
            name = f"epoch-{epoch:04d}-step-{within.step:05d}.npz"
        path = self.folder / name
        if not self.writes:
            return path
        improved = score is not None and not math.isnan(score) and (self.best is None or score > self.best)
        best = score if improved else self.best
        try:
            with writable(self.folder):
                archive.write(path, state.arrays, {"position": position, "best": best, "state": state.facts})
                if improved:
                    with open(path, "rb") as source:
                        archive.replace(self.folder / "best.npz", lambda file: shutil.copyfileobj(source, file))
        except NotFinite as error:
            raise NotFinite(f"after epoch {epoch + (within is not None)}: {error}. {self.saved()}") from error
        self.best = best
        for old in checkpoints(self.folder)[:-KEEP]:
            with contextlib.suppress(FileNotFoundError):  # someone tidied up by hand
                os.unlink(old)
        if self._signal is not None:
            where = f"in epoch {epoch + 1}, after step {position.step}" if position.step else f"after epoch {epoch}"
            raise Stopped(f"stopped {where}; {path} has everything. Continue with --resume", 128 + self._signal)
        return path

    def finish(self) -> tuple[Path, Path]:
        """Draw the curves; returns the newest checkpoint's path and the picture's."""
        if not self.writes:
            return self.folder, self.folder
        return checkpoints(self.folder)[-1], self.report.draw(self.title)


def _load(folder: Path) -> tuple[Position, Archive, Optional[float]]:
    *older, newest = checkpoints(folder)
    try:
        arrays, facts = archive.read(newest)
    except CheckpointError as error:
        before = f"and --resume continues from {older[-1].name}" if older else "and begin anew: no older one is there"
        raise CheckpointError(f"{error}. Delete it {before}") from error
    if not {"position", "best", "state"} <= set(facts):
        raise CheckpointError(f"{newest} was not written by a run: it has no position to continue from")
    return Position(*facts["position"]), Archive(arrays, facts["state"]), facts["best"]
