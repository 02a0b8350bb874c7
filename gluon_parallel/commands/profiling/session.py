"""``gp.profile``: records the steps of an unchanged loop, and writes a page, a trace and a summary."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from ...archive import writable
from ...cores import num_logical
from ...datasets.loader import Loader
from ...environment import launched_rank
from ...kvstore.contract import is_distributed
from ...mxnet.compat import mx
from ...mxnet.engine import mark
from ...mxnet.trainers import parameters_of, store_of, updates_on_store
from ...nn import would_convert
from ...nn.sync_batch_norm.measured import recorded as recorded_passes
from ...nn.sync_batch_norm.sync_group import all_sync_groups
from ...pipeline import Pipeline
from . import observers
from .analysis import Analysis
from .findings import findings, summary
from .page import page, write_trace
from .recording import STEP, Recording, Span, gathered, host, recorded

MARK = "gluon_parallel.step"
_running: list[Session] = []  # at most one, as MXNet's profiler is one


class Session:
    """A profile under way; made by :func:`profile`.

    Attributes:
        analysis: an :class:`.Analysis` of all processes on process 0, once the steps are recorded; else None.
        findings: sentences about it.
    """

    def __init__(self, folder, steps, skip):
        self.analysis: Any = None
        self.findings: list[str] = []
        self._folder, self._num_steps, self._num_skipped = Path(folder), steps, skip
        self._stack = contextlib.ExitStack()  # what is watched from the beginning
        self._recording: Any = None  # contexts that are open while steps are recorded
        self._made = Recording()
        self._seen = 0  # steps
        self._entered = 0  # the block, by the system's clock
        self._devices: list[Any] = []
        self._arrays: dict[Any, dict[Any, list[Any]]] = {}  # trainer -> device -> what it updates there
        self._trainer: Any = None
        self._net: Any = None

    def __str__(self):
        return summary(self.analysis, self.findings) if self.analysis is not None else ""

    def __enter__(self):
        if _running:
            raise RuntimeError("a profile is under way already; leave its block, or run the script without the command")
        with writable(f"profile: the folder {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._entered = time.time_ns()
        self._stack.enter_context(observers.watched_steps(self._step_ended))
        # From the beginning: a loop asks its loader for an iterator once.
        self._reads = self._stack.enter_context(observers.recorded_reading([Loader]))
        self._stack.enter_context(observers.replaced(Pipeline, "profile", self._ended_before))
        _running.append(self)
        self._stack.callback(_running.clear)
        return self

    def __exit__(self, kind, error, trace):
        well = error is None or isinstance(error, SystemExit) and error.code in (None, 0)
        try:
            self._finish(write=well)
            if well and self._seen <= self._num_skipped:
                said = f"{self._num_skipped} steps are skipped, and the loop made {self._seen}"
                print(f"gluon_parallel: nothing was profiled: {said}", file=sys.stderr)
        finally:
            self._stack.close()

    def _step_ended(self, began, trainer, net, num_samples):
        self._seen += 1
        if self._recording is not None:
            self._made.spans.append(Span(STEP, began, time.monotonic_ns()))
            self._made.num_samples += num_samples
            own, first = self._updated_by(trainer), self._updated_by(self._trainer)
            for device in self._devices:
                mark(own.get(device, first[device]), MARK)
            if self._seen == self._num_skipped + self._num_steps:
                self._finish()
        elif self._seen == self._num_skipped:
            self._start(trainer, net)

    def _start(self, trainer, net):
        self._trainer, self._net = trainer, net or observers.net_of(trainer)
        devices = self._devices = sorted(self._updated_by(trainer), key=lambda one: (one.device_typeid, one.device_id))
        mx.nd.waitall()
        made = self._made
        store = store_of(trainer)
        made.rank = store.rank if is_distributed(store) else launched_rank()
        made.host, made.is_by_hand, made.num_cores = host(), net is None, num_logical()
        made.devices = [str(device) for device in devices]
        with contextlib.ExitStack() as stack:
            made.passes = stack.enter_context(recorded_passes(all_sync_groups()))
            made.operators = stack.enter_context(recorded(devices))
            self._recording = stack.pop_all()
        made.processor, made.idle = -observers.processor_seconds(), -observers.idle_seconds()
        made.begin = time.monotonic_ns()

    def _updated_by(self, trainer):
        """On each device the weights and gradients of a trainer; a program may have several."""
        if trainer not in self._arrays:
            found = self._arrays[trainer] = {}
            for parameter in parameters_of(trainer):
                if parameter.grad_req != "null":
                    for array in (*parameter.list_data(), *parameter.list_grad()):
                        found.setdefault(array.ctx, []).append(array)
        return self._arrays[trainer]

    def _ended_before(self, method):
        """The method, which needs MXNet's profiler for itself, after the end of the recording."""

        def call(*args, **kwargs):
            self._finish()
            return method(*args, **kwargs)

        return call

    def _finish(self, write=True):
        """Stop watching and recording, if steps are being recorded; write what was found on process 0."""
        if self._recording is None:
            return
        self._stack.close()
        recording, self._recording = self._recording, None
        with recording:
            mx.nd.waitall()
            made = self._made
            made.processor, made.end = made.processor + observers.processor_seconds(), time.monotonic_ns()
            made.idle += observers.idle_seconds()
        reads = [span for span in self._reads if made.begin <= span.begin < made.end]
        made.spans = sorted([*made.spans, *reads], key=lambda span: span.begin)
        made.marks = [
            [made.begin, *(one.begin for one in made.operators if one.name == MARK and one.device == device)]
            for device in range(len(made.devices))
        ]
        made.operators = [one for one in made.operators if one.name != MARK]
        made.would_convert = would_convert(self._net) if self._net is not None else {}
        if write and self._seen > self._num_skipped:
            self._write()

    def _write(self):
        store = None if updates_on_store(self._trainer) else store_of(self._trainer)
        recordings = gathered(store, self._made)
        if self._made.rank != 0 and len(recordings) > 1:
            return
        self.analysis = Analysis(recordings)
        self.findings = findings(self.analysis)
        # Where the trainer's store gathers nothing, each process writes its own files.
        name = f"rank-{self._made.rank}" if self._made.rank else "profile"
        html = self._folder / f"{name}.html"
        if html.exists() and html.stat().st_mtime_ns > self._entered:  # another process's, started beside this one
            html = html.with_stem(f"{name}-{os.getpid()}")
        trace = html.with_suffix(".json")
        with writable(f"profile: the folder {self._folder}"):
            html.write_text(page(self.analysis, self.findings), "utf-8")
            write_trace(trace, self.analysis)
        print(f"{self}\n\npage: {html}\ntrace, for https://ui.perfetto.dev: {trace}", flush=True)


def profile(folder="profile", steps=20, skip=5):
    """Find out where the time of the training steps in a ``with`` block goes, per device and process.

    Steps of ``DataParallel`` and ``Pipeline`` are found by themselves; in a hand-written loop a step ends with
    ``trainer.step``. When `steps` steps have been recorded, process 0 prints a summary and writes ``profile.html``, a
    page with plots and findings, and ``profile.json``, a trace of all processes for https://ui.perfetto.dev; the loop
    goes on. In a group of processes, all of them open the block around the same steps. Only a bound method, such as
    ``parallel.step``, that was put into a variable before the block is not noticed.

    MXNet's profiler records the operators, so a program cannot use it for itself meanwhile.

    Args:
        folder: for the files, made if it is not there.
        steps: how many are recorded.
        skip: how many come before them, in which MXNet makes its buffers; at least one.

    Returns:
        A context manager, whose value is a :class:`Session`.

    Raises:
        ValueError: `steps` or `skip` is no whole number of at least 1.
        OutputUnavailable: the folder cannot be made or written to.
        DeviceUnavailable: MXNet's profiler has no place for a device.

    Example:
        >>> import tempfile
        >>> import gluon_parallel as gp
        >>> net = mx.gluon.nn.Dense(1, in_units=3)
        >>> net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        >>> trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        >>> step = gp.DataParallel(net, mx.gluon.loss.L2Loss(), trainer)
        >>> with tempfile.TemporaryDirectory() as folder, gp.profile(folder, steps=2, skip=1) as found:
        ...     for _ in range(3):
        ...         loss = step(mx.nd.ones((4, 3)), mx.nd.ones((4, 1)))
        2 steps of ... ms...
        >>> sorted(timeline.device for timeline in found.analysis.timelines)
        ['cpu(0)', 'cpu(1)']
    """
    if not all(isinstance(number, int) and number >= 1 for number in (steps, skip)):
        raise ValueError(f"profile: steps={steps!r}, skip={skip!r}; both are whole numbers of at least 1")
    return Session(folder, steps, skip)
