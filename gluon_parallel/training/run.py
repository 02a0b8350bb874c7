"""Folder of a training run: config, metrics log, curves, TensorBoard's files, the newest checkpoints and the best."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable, Optional, Union

from .. import archive
from ..archive import writable
from ..environment import LAUNCH_FOLDER, taken_by
from ..errors import CheckpointError, ConfigError, NotFinite
from . import pictures, report

BEST = "best.npz"
_NAME = re.compile(r"epoch-(\d+)(-step-\d+)?\.npz")


class Run:
    """A training run's folder. ``gp.prepare(..., run=...)`` and :class:`.Loop` fill it; alone it serves any loop.

    ``config.yaml``, ``metrics.jsonl``, ``curves.png``, ``tensorboard/`` and the checkpoints: the newest ones,
    ``epoch-0007.npz`` (``epoch-0007-step-00042.npz`` of a training that was stopped within an epoch), and ``best.npz``.

    ``metrics.jsonl`` has a row for each epoch, and one with ``"step"``, counted over all epochs, for each logged step.

    Args:
        folder: made when training begins. Training continues from the newest checkpoint that lies there. None: there is
            none, and only the table on the terminal is shown.
        keep: how many of the newest checkpoints are kept; the second is there for when the last one's disk fails.
        tensorboard: whether to write TensorBoard event files, of epochs into ``tensorboard/``, of steps into
            ``tensorboard/steps/``; ConfigError where tensorboardX is not installed.
        config: what ``config.yaml`` shall hold; None: there is none.
        is_numbered: `folder` holds many runs, and this one gets a folder in it with the next number.
        log_every: a loop logs every so manieth step by itself, see :meth:`.Loop.log`; 0: none.
        csv: whether to write ``metrics.csv`` too, the same rows as a table, after each epoch.

    Attributes:
        writes: whether this process writes and prints; of several, process 0.
        rows: of the epochs in the log, those of the training that is continued included.

    Example:
        >>> import tempfile
        >>> run = Run(tempfile.mkdtemp(), keep=1)
        >>> for epoch in (1, 2):
        ...     run.log(epoch=epoch, loss=1 / epoch)
        ...     path = run.keep(lambda path: path.write_text("gp.checkpoint.save(path, net, trainer)"), epoch)
        epoch      loss
            1    1.0000
            2    0.5000
        >>> [path.name for path in run.checkpoints()]
        ['epoch-0002.npz']
    """

    def __init__(self, folder: Union[str, os.PathLike, None], keep: int = 2, tensorboard: bool = False,
                 config: Optional[str] = None, is_numbered: bool = False, log_every: int = 50,
                 csv: bool = False) -> None:  # fmt: skip
        if isinstance(log_every, bool) or not isinstance(log_every, int) or log_every < 0:
            raise ValueError(f"log_every: expected a whole number of steps, or 0 for none, got {log_every!r}")
        self._folder, self.keep_newest, self.writes = None if folder is None else Path(folder), keep, True
        self._tensorboard, self._config, self._is_numbered = tensorboard, config, is_numbered
        self.rows: list[dict[str, float]] = []
        self.advice = "Start the script again to continue" if config is None else "Continue with --resume"
        self._num_shown, self._titled = 0, set[str]()  # rows and columns that the terminal has seen
        self._writer: Optional[_Events] = None
        self._writer_of_steps: Optional[_Events] = None  # from the first such row on
        self._first_step = 1  # in it
        self._has_begun, self.log_every, self._csv = False, log_every, csv
        self._waiting: list[dict[str, float]] = []  # rows of steps that are not yet in the files
        self._written_at = 0.0

    def __bool__(self) -> bool:
        """Whether there is a folder."""
        return self._folder is not None

    @property
    def folder(self) -> Path:
        """The run's own, once training has begun."""
        if self._folder is None:
            raise ValueError("this run has no folder; make it with one, gp.Run(folder)")
        return self._folder

    def checkpoints(self) -> list[Path]:
        """Those in the folder, oldest first; ``best.npz`` is not among them."""
        found = [path for path in self.folder.glob("epoch-*.npz") if _NAME.fullmatch(path.name)] if self else []
        return sorted(found, key=lambda path: list(map(int, re.findall(r"\d+", path.name))))

    def begin(self, writes: bool = True, num_steps: Optional[int] = None) -> None:
        """Make the folder and open its log; the other methods do it if need be. OutputUnavailable: it cannot be.

        Of a training that is continued, the log keeps what it had when it was saved: epochs, and of the steps after
        them those up to `num_steps`.
        """
        self.writes = writes
        if not writes or self._has_begun or not self:
            return
        self._has_begun = True
        if self._is_numbered:
            self._folder = number(self.folder)
        with self._writable():
            self.folder.mkdir(parents=True, exist_ok=True)
            if (config := self._config) is not None:
                archive.replace(self.folder / "config.yaml", lambda file: file.write(config.encode()))
            # Later rows were never saved in a checkpoint.
            epochs = [int(found[1]) for path in self.checkpoints() if (found := _NAME.fullmatch(path.name))]
            until_epoch = max(epochs, default=0)
            rows = report.read_metrics(self._metrics, until_epoch, num_steps)
            self.rows = [row for row in rows if "step" not in row]
            archive.replace(self._metrics, lambda file: file.write(_lines(rows)))
            weakref.finalize(self, _append, self._metrics, self._waiting)  # of a run that ends by an error
            if self._tensorboard:
                self._writer = _Events(self.folder / "tensorboard", until_epoch + 1)
                self._first_step = 1 + max((int(row["step"]) for row in rows if "step" in row), default=0)
            if (path := note()) is not None:
                path.write_text(str(self.folder.resolve()), encoding="utf-8")

    def _writable(self) -> contextlib.AbstractContextManager[None]:
        other = "--output FOLDER" if self._config is not None else "gp.Run(folder)"
        return writable(f"the output folder {self.folder}", f"Free space there, or choose another: {other}")

    def share(self, folder: str) -> None:
        """Know the folder that the writing process has made, to write there where this one becomes the writing one."""
        self._folder, self._is_numbered = Path(folder), False

    @property
    def _metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    def log(self, **row: float) -> None:
        """Add one epoch's numbers to the table on the terminal, ``metrics.jsonl`` and TensorBoard's files.

        ``log(epoch=1, loss=0.3, test_accuracy=0.97)``; losses, and metrics that are always from 0 to 1, are also drawn.
        OutputUnavailable: a file cannot be written; metrics.jsonl is as before.
        """
        self.begin(self.writes)
        if not self.writes:
            return
        self.rows.append(row)
        if self:
            self._write_steps()
            _append(self._metrics, [row], sync=True)
            if self._csv:
                rows = report.read_metrics(self._metrics, int(row["epoch"]))
                archive.replace(self.folder / "metrics.csv", lambda file: report.write_csv(rows, file))
        if self._writer is not None:
            with self._writable():
                self._writer.write(int(row["epoch"]), row)
        self._show()

    def log_step(self, step: int, epoch: int, **values: float) -> None:
        """Add numbers of one step to ``metrics.jsonl`` and TensorBoard's files, which get them a second later at most.

        Args:
            step, epoch: their numbers, counted from 1; that of the step goes on from epoch to epoch.
            values: by name, such as ``loss=0.3``.
        """
        self.begin(self.writes)
        if not self.writes or not self:
            return
        self._waiting.append({"step": step, "epoch": epoch, **values})
        if time.monotonic() - self._written_at > 1.0:
            self._write_steps()

    def _write_steps(self) -> None:
        """Write the rows of steps that wait."""
        rows = [*self._waiting]
        _append(self._metrics, self._waiting)
        self._written_at = time.monotonic()
        if self._writer is not None and rows:
            with self._writable():
                if self._writer_of_steps is None:
                    self._writer_of_steps = _Events(self.folder / "tensorboard" / "steps", self._first_step)
                for row in rows:
                    self._writer_of_steps.write(int(row["step"]), row, "steps/")

    def _show(self) -> None:
        """Print the table's new rows, with a header above the first and above one with more columns."""
        for row in self.rows[self._num_shown :]:
            if not row.keys() <= self._titled:
                print(report.header(row))
                self._titled = set(row)
            print(report.line(row), flush=True)
        self._num_shown = len(self.rows)

    def keep(self, write: Callable[[Path], Any], epoch: int, step: int = 0, is_best: bool = False) -> Path:
        """Keep a checkpoint, and remove those that are no longer among the newest.

        Args:
            write: ``write(path)`` writes it; called on every process.
            epoch: complete epochs.
            step: complete steps of the next one.
            is_best: keep it as ``best.npz`` too.

        Raises:
            NotFinite: a loss or an array is NaN or infinite; the last good checkpoint stays.
            OutputUnavailable: the file cannot be written, for the disk is full for instance; older ones are as before.
        """
        self.begin(self.writes)
        path = self.folder / (f"epoch-{epoch:04d}" + f"-step-{step:05d}" * (step > 0) + ".npz")
        try:
            write(path)
        except NotFinite as error:
            raise NotFinite(f"after epoch {epoch + (step > 0)}: {error}. {self.last()}") from error
        if self.writes:
            self._write_steps()
            with self._writable():
                if is_best:
                    with open(path, "rb") as source:
                        archive.replace(self.folder / BEST, lambda file: shutil.copyfileobj(source, file))
                for old in self.checkpoints()[: -self.keep_newest]:
                    old.unlink(missing_ok=True)  # someone may have tidied up by hand
        return path

    def last(self) -> str:
        """Which checkpoint there is, as a sentence without its full stop."""
        there = self.checkpoints()
        return f"The last good checkpoint is {there[-1]}" if there else "No checkpoint has been saved yet"

    def finish(self) -> Path:
        """Draw the curves of all epochs so far, and close TensorBoard's files; returns the picture's path.

        OutputUnavailable: the picture cannot be written.
        """
        self.begin(self.writes)
        path = self.folder / "curves.png"
        if self.writes:
            self._show()
            self._write_steps()
            for writer in filter(None, (self._writer, self._writer_of_steps)):
                with self._writable():
                    writer.close()
            pictures.write(lambda: report.curves(self.rows, str(self.folder)), path, dpi=144)
        return path


def _lines(rows: Sequence[Mapping[str, float]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _append(path: Path, rows: list[dict[str, float]], sync: bool = False) -> None:
    """Move rows to the end of a ``metrics.jsonl``, all or none; `sync`: they must survive a power cut."""
    if not rows:
        return
    with writable(str(path)), open(path, "ab", buffering=0) as file:
        size, data = file.tell(), _lines(rows)
        try:
            while data:
                data = data[file.write(data) :]
            if sync:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise
    rows.clear()


def _numbered(parent: Path) -> list[Path]:
    """The folders of the runs in `parent`, oldest first."""
    folders = [path for path in parent.glob("*") if path.name.isdigit() and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name))


def find(parent: Path, resume: str) -> Path:
    """The folder of the run to continue: that named by `resume`, or with ``newest`` the newest one in `parent`."""
    candidates = _numbered(parent) if resume == "newest" else [Path(resume)]
    for folder in reversed(candidates):
        if Run(folder).checkpoints() and (folder / "config.yaml").exists():
            return folder
    where = parent if resume == "newest" else resume
    raise CheckpointError(
        f"--resume: there is no run with a checkpoint in {where}. Leave --resume out to begin one, or name a run's "
        "folder: --resume runs/lenet/default/1"
    )


def number(parent: Path, other: str = "--output FOLDER") -> Path:
    """Make a folder with the number after the last one's in `parent`; an error says how to name another."""
    with writable(f"the output folder {parent}", f"Choose another: {other}"):
        parent.mkdir(parents=True, exist_ok=True)
        following = int(_numbered(parent)[-1].name) + 1 if _numbered(parent) else 1
        while True:
            folder = parent / str(following)
            try:
                folder.mkdir()
                return folder
            except FileExistsError:  # another run began at this moment
                following += 1


class _Events:
    """A TensorBoard event file in a folder, in which `begin` is the first epoch that counts of earlier files.

    tensorboardX's SummaryWriter writes in a thread, which a full disk ends, so that a later call waits for ever.
    """

    def __init__(self, folder: Path, begin: int) -> None:
        try:
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto.event_pb2 import Event, SessionLog
        except ImportError as error:
            raise ConfigError(
                "tensorboard: true needs tensorboardX, which is not here: pip install 'tensorboardX>=2.6,<2.7'; "
                "metrics.jsonl has the same numbers"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        self._event, self._scalar = Event, summary.scalar
        self._file = event_file_writer.EventsWriter(str(folder / "events"))
        weakref.finalize(self, _close, self._file)  # of a run that ends without `finish`
        start = SessionLog(status=SessionLog.START)
        self._file.write_event(Event(wall_time=time.time(), step=begin, session_log=start))
        self._file.flush()

    def write(self, number: int, row: Mapping[str, float], prefix: str = "") -> None:
        """Append the numbers of the epoch, or step, of that number."""
        for key, value in row.items():
            if key not in ("epoch", "step"):
                summary = self._scalar(prefix + key, value)
                self._file.write_event(self._event(wall_time=time.time(), step=number, summary=summary))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _close(file: Any) -> None:
    with contextlib.suppress(OSError, ValueError):  # what it could not write has been told; or it is closed
        file.close()


def note() -> Optional[Path]:
    """The file in which a launch keeps the name of its run's folder for its next attempt; None where this is none's."""
    folder = os.environ.get(LAUNCH_FOLDER)
    return None if folder is None or taken_by() is not None else Path(folder) / "run.txt"
