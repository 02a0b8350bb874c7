"""What a pipeline's step took: when each pass ran, memory of each stage, and other numbers of micro-batches."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Sequence
from typing import Callable

import numpy as np

from ..mxnet import profiler
from ..mxnet.compat import mx
from .orders import BACKWARD, FORWARD, Task, bubble, most_held, simulated
from .stage import ArrayForm, Recorder, pass_counts

# The counter of a device stops at 0, also where arrays from before are freed; so it starts that much above.
_BALLAST = 1 << 26  # bytes that nobody touches
_LATE = 0.1  # seconds in which MXNet has freed the arrays of operations that have ended
_TRIES = 20
_COUNTER = re.compile(r"^(Memory: .*?) +\d+ +[\d.]+ +([\d.]+) +[\d.]+$", re.MULTILINE)  # count, least, most, average


class Profile:
    """One measured step of a pipeline; its text has a row per stage and one per number of micro-batches.

    Attributes:
        counts: of how many micro-batches each stage runs passes; 1 for a stage with SyncBatchNorm, which takes all as
            one.
        passes: for each replica {task: (begin, end)} in seconds from the first pass's begin; a task is (stage,
            ``"forward"`` or ``"backward"``, micro-batch).
        parameters: bytes of each stage's parameters and their gradients.
        activations: bytes of all arrays that each stage's operators return in one pass; None where a stage is no
            HybridBlock.
        peaks: bytes of arrays that were made in the step and were there at most at a time, on each stage's device (of
            several replicas the most). None if one is a CPU device that MXNet does not count, far beyond the cores.
        num_held: of how many micro-batches each stage keeps activations, or with `recompute` inputs, at a time.
        seconds: from the first pass's begin to the last one's end.
        idle: the share of this time in which the devices ran no pass.
    """

    def __init__(
        self,
        stages: Sequence[mx.gluon.Block],
        order: str,
        recompute: bool,
        num_micro_batches: int,
        recorders: Sequence[Recorder],
        peaks: Sequence[int | None],
    ) -> None:
        self.order, self.recompute, self.num_micro_batches, self._stages = order, recompute, num_micro_batches, stages
        self.counts = pass_counts(stages, num_micro_batches)
        self.num_held = [most_held(order, stage, self.counts) for stage in range(len(stages))]
        inputs = [recorders[0].inputs[stage] for stage in range(len(stages))]
        self._inputs = [sum(size_of(*one) for one in arrays) for arrays in inputs]
        self.parameters = [parameter_bytes(block, with_gradients=True) for block in stages]
        self.activations = [activation_bytes(block, arrays) for block, arrays in zip(stages, inputs)]
        known = [[one for one in peaks[stage :: len(stages)] if one is not None] for stage in range(len(stages))]
        self.peaks = [max(found) if len(found) == len(recorders) else None for found in known]
        first = min(min(recorder.begins.values()) for recorder in recorders)
        self.passes = [
            {task: (begin - first, recorder.ends[task] - first) for task, begin in recorder.begins.items()}
            for recorder in recorders
        ]
        self.seconds = max(end for passes in self.passes for _, end in passes.values())
        busy = sum(end - begin for passes in self.passes for begin, end in passes.values())
        self.idle = 1 - busy / (self.seconds * len(stages) * len(self.passes))

    def duration(self, stage: int, kind: str) -> float:
        """Seconds of a pass through this stage; the median. 0 if there is none: a frozen stage has no backward pass."""
        tasks = [task for passes in self.passes for task in passes.items()]
        found = [end - begin for task, (begin, end) in tasks if task[:2] == (stage, kind)]
        return statistics.median(found or [0.0])

    def predict(
        self, num_micro_batches: int | None = None, order: str | None = None
    ) -> dict[Task, tuple[float, float]]:
        """When the passes of a step would run, ``{task: (begin, end)}``, with the measured durations.

        Args:
            num_micro_batches: of the same batch; passes are taken to be shorter in proportion. By default as measured.
            order: ``"1f1b"`` or ``"gpipe"``; by default as measured.
        """
        counts = pass_counts(self._stages, num_micro_batches or self.num_micro_batches)
        forward, backward = (
            [self.duration(stage, kind) * self.counts[stage] / count for stage, count in enumerate(counts)]
            for kind in (FORWARD, BACKWARD)
        )
        return simulated(order or self.order, forward, backward, counts)

    def predicted_seconds(self, num_micro_batches: int | None = None, order: str | None = None) -> float:
        """How long the passes of a step would take; see :meth:`predict`."""
        return max(end for _, end in self.predict(num_micro_batches, order).values())

    def memory(self, stage: int) -> int | None:
        """Bytes that this stage is predicted to need: parameters, gradients and what it holds of the micro-batches.

        Without the optimizer's state and the operators' temporary memory; None where the activations are not known.
        """
        activations = self.activations[stage]
        if activations is None:
            return None
        held, once = (self._inputs[stage], activations) if self.recompute else (activations, 0)
        return self.parameters[stage] + self.num_held[stage] * held + once

    def measured_memory(self, stage: int) -> int | None:
        """Bytes of this stage's parameters and gradients, and of all arrays made in the step that were there at a time.

        With the operators' temporary memory and the arrays on their way to this device. Without the optimizer's state,
        and the buffers that MXNet keeps for operators; None where MXNet does not count the devices' memory.
        """
        peak = self.peaks[stage]
        return None if peak is None else self.parameters[stage] + peak

    def __str__(self) -> str:
        num, num_stages = self.num_micro_batches, len(self.parameters)
        lines = [
            f"{num_stages} stages, {num} micro-batches, order {self.order}: {self.seconds * 1e3:.1f} ms, predicted "
            f"{self.predicted_seconds() * 1e3:.1f}; idle {self.idle:.0%}, predicted "
            f"{bubble(self.order, self.counts):.0%}",
            "stage  forward, ms  backward, ms  parameters and gradients, MB  activations, MB  held  together, MB  "
            "measured, MB",
        ]
        for stage in range(num_stages):
            forward, backward = (self.duration(stage, kind) * 1e3 for kind in (FORWARD, BACKWARD))
            lines.append(
                f"{stage:5}  {forward:11.2f}  {backward:12.2f}  {self.parameters[stage] / 1e6:28.2f}"
                f"  {_megabytes(self.activations[stage]):>15}  {self.num_held[stage]:4}"
                f"  {_megabytes(self.memory(stage)):>12}  {_megabytes(self.measured_memory(stage)):>12}"
            )
        lines.append("micro-batches  bubble  predicted ms: 1f1b  gpipe")
        for other in sorted({1, 2, 4, 8, 16, num}):
            ours, theirs = (self.predicted_seconds(other, order) * 1e3 for order in ("1f1b", "gpipe"))
            idle = bubble("gpipe", pass_counts(self._stages, other))
            lines.append(f"{other:13}  {idle:6.0%}  {ours:18.1f}  {theirs:5.1f}")
        return "\n".join(lines)

    def draw(self, path: str | os.PathLike) -> None:
        """Draw the passes of each device, measured and predicted, and each stage's memory (PNG, PDF, SVG).

        Args:
            path: of the file; its ending says the format.
        """
        from matplotlib.figure import Figure  # without a window, and only for those who draw

        rows = [
            (f"replica {replica}, stage {stage}" if len(self.passes) > 1 else f"stage {stage}", passes, stage)
            for replica, passes in enumerate(self.passes)
            for stage in range(len(self.parameters))
        ]
        rows += [(f"stage {stage}, predicted", self.predict(), stage) for stage in range(len(self.parameters))]
        num_stages = len(self.parameters)
        heights = [0.6 + 0.45 * len(rows), 0.6 + 0.5 * num_stages]
        figure = Figure(figsize=(10, sum(heights)), layout="constrained", facecolor="white")
        axes, below = figure.subplots(2, gridspec_kw={"height_ratios": heights})
        for index, (_, passes, stage) in enumerate(rows):
            for task, (begin, end) in passes.items():
                if task.stage == stage:
                    colour = "#4363d8" if task.kind == FORWARD else "#e6a04b"
                    axes.barh(index, (end - begin) * 1e3, left=begin * 1e3, color=colour, edgecolor="white", height=0.8)
                    middle = (begin + end) / 2 * 1e3
                    axes.text(middle, index, task.micro_batch, ha="center", va="center", fontsize=7, clip_on=True)
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.set(xlabel="ms", ylim=(len(rows) - 0.4, -0.6))
        title = f"forward (blue) and backward (orange) passes, order {self.order}: idle {self.idle:.0%}"
        axes.set_title(title, loc="left", fontweight="bold")
        for index, (how, colour) in enumerate(((self.memory, "#b0b7c3"), (self.measured_memory, "#3cb44b"))):
            sizes = [(how(stage) or 0) / 1e6 for stage in range(num_stages)]
            bars = below.barh([stage + 0.4 * index - 0.2 for stage in range(num_stages)], sizes, 0.36, color=colour)
            below.bar_label(bars, [_megabytes(how(stage)) for stage in range(num_stages)], padding=3, fontsize=7)
        below.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
        below.set(xlabel="MB", ylim=(num_stages - 0.4, -0.6))
        below.margins(x=0.1)
        below.set_title("memory: predicted (grey) and measured (green)", loc="left", fontweight="bold")
        figure.savefig(path, dpi=120)


def _megabytes(count: int | None) -> str:
    return "?" if count is None else f"{count / 1e6:.2f}"


def parameter_bytes(block: mx.gluon.Block, with_gradients: bool = False) -> int:
    """Bytes of a block's parameters."""
    parameters = block.collect_params().values()
    num = {one: 1 + (with_gradients and one.grad_req != "null") for one in parameters}
    return sum(size_of(one.shape, np.dtype(one.dtype)) * num[one] for one in parameters)


def size_of(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Bytes of an array."""
    return int(np.prod(shape)) * dtype.itemsize


def activation_bytes(block: mx.gluon.Block, inputs: Sequence[ArrayForm]) -> int | None:
    """Bytes of all arrays that the operators of a HybridBlock return; None for another block."""
    if not isinstance(block, mx.gluon.HybridBlock) or mx.util.is_np_array():
        return None
    names = [f"data{number}" for number in range(len(inputs))]
    outputs = block(*map(mx.sym.var, names))
    graph = mx.sym.Group(list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]).get_internals()
    _, shapes, _ = graph.infer_shape(**{name: shape for name, (shape, _) in zip(names, inputs)})
    _, dtypes, _ = graph.infer_type(**{name: dtype for name, (_, dtype) in zip(names, inputs)})
    variables = {*graph.list_arguments(), *graph.list_auxiliary_states()}
    outputs = zip(graph.list_outputs(), shapes, dtypes)
    return sum(size_of(shape, np.dtype(dtype)) for name, shape, dtype in outputs if name not in variables)


def peaks(devices: Sequence[mx.Context], function: Callable[[], object]) -> list[int | None]:
    """Call ``function()``, wait for all that it has launched, and return the memory that it needed on each device.

    That is how many bytes of arrays were there at most, beyond those from before, by MXNet's profiler. None for a
    device where other threads make arrays all the time, and for all devices if MXNet does not count one of them: it
    counts two CPU devices more than cores.

    Example:
        >>> peaks([mx.cpu(0)], lambda: mx.nd.zeros(1000) + mx.nd.zeros(1000))
        [12000]
    """
    if not all(map(profiler.has_place_for, devices)):
        function()
        mx.nd.waitall()
        return [None] * len(devices)
    # Operators are not recorded: a thread may still free an array on a device that MXNet does not count, which is an
    # error then, and would end the process otherwise.
    with profiler.configured(profile_memory=True, profile_symbolic=False, profile_imperative=False):
        time.sleep(_LATE)
        found = [_start(device) for device in devices]
        mx.profiler.set_state("run")
        function()
        mx.nd.waitall()
        most = _read()
    return [one and max(0, round(most.get(one[0], one[1]) - one[1])) for one in found]


def _start(device: mx.Context) -> tuple[str, float, list[mx.nd.NDArray]] | None:
    """Begin to count a device's memory: its counter's name, its value in bytes, and the arrays that keep it above 0."""
    ballast: list[mx.nd.NDArray] = []  # of all tries, so that none is freed while it counts
    for _ in range(_TRIES):  # until nothing else changes, such as an array of the caller's that is freed late
        mx.profiler.set_state("run")
        ballast.append(mx.nd.empty(_BALLAST // 4, ctx=device))
        counters = _read()
        if len(counters) == 1:
            [(name, value)] = counters.items()
            return name, value, ballast
    return None


def _read() -> dict[str, float]:
    """Name of each counter that has changed, and the most that it has been, in bytes; they are forgotten then."""
    return {name: 1000 * float(value) for name, value in _COUNTER.findall(mx.profiler.dumps(reset=True))}
