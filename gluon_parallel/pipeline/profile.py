"""What a pipeline's step took: when each pass ran, memory of each stage, and other numbers of micro-batches."""

from __future__ import annotations

import statistics
import time

import numpy as np

from ..compat import mx
from ..engine import push
from .orders import BACKWARD, FORWARD, bubble, most_held, simulated


class Recorder:
    """Notes in the engine when the passes of one replica begin and end."""

    def __init__(self):
        self.begins: dict = {}
        self.ends: dict = {}
        self.inputs: dict = {}  # stage -> shapes and types of the first micro-batch's inputs

    def begin(self, task, arrays):
        """Note when `arrays`, on which `task` works, are ready; nothing that is launched later uses them before."""
        if task.kind == FORWARD:
            self.inputs.setdefault(task.stage, [(array.shape, np.dtype(array.dtype)) for array in arrays])
        if arrays:
            push(lambda: self.begins.setdefault(task, time.perf_counter()), write=arrays, name="begin")

    def end(self, task, results):
        """Note when the last of `results` is ready."""
        for array in results:
            push(lambda: self.ends.__setitem__(task, time.perf_counter()), read=[array], name="end")


class Profile:
    """One measured step of a pipeline; its text has a row per stage and one per number of micro-batches.

    Attributes:
        passes: for each replica {task: (begin, end)} in seconds from the first pass's begin; a task is (stage,
            ``"forward"`` or ``"backward"``, micro-batch).
        parameters: bytes of each stage's parameters and their gradients.
        activations: bytes of all arrays that each stage's operators return for one micro-batch; None where a stage is
            no HybridBlock.
        num_held: of how many micro-batches each stage keeps activations, or with `recompute` inputs, at a time.
        seconds: from the first pass's begin to the last one's end.
        idle: the share of this time in which the devices ran no pass.
    """

    def __init__(self, order, recompute, num_micro_batches, recorders, parameters, activations):
        self.order, self.recompute, self.num_micro_batches = order, recompute, num_micro_batches
        self.parameters, self.activations = parameters, activations
        self.num_held = [
            most_held(order, stage, len(parameters), num_micro_batches) for stage in range(len(parameters))
        ]
        self._inputs = [sum(_size(*one) for one in recorders[0].inputs[stage]) for stage in range(len(parameters))]
        first = min(min(recorder.begins.values()) for recorder in recorders)
        self.passes = [
            {task: (begin - first, recorder.ends[task] - first) for task, begin in recorder.begins.items()}
            for recorder in recorders
        ]
        self.seconds = max(end for passes in self.passes for _, end in passes.values())
        busy = sum(end - begin for passes in self.passes for begin, end in passes.values())
        self.idle = 1 - busy / (self.seconds * len(parameters) * len(self.passes))

    def duration(self, stage, kind):
        """Seconds of a pass through this stage; the median. 0 if there is none: a frozen stage has no backward pass."""
        tasks = [task for passes in self.passes for task in passes.items()]
        found = [end - begin for task, (begin, end) in tasks if task[:2] == (stage, kind)]
        return statistics.median(found or [0.0])

    def predict(self, num_micro_batches=None, order=None):
        """When the passes of a step would run, ``{task: (begin, end)}``, with the measured durations.

        Args:
            num_micro_batches: of the same batch; passes are taken to be shorter in proportion. By default as measured.
            order: ``"1f1b"`` or ``"gpipe"``; by default as measured.
        """
        num = num_micro_batches or self.num_micro_batches
        forward, backward = (
            [self.duration(stage, kind) * self.num_micro_batches / num for stage in range(len(self.parameters))]
            for kind in (FORWARD, BACKWARD)
        )
        return simulated(order or self.order, forward, backward, num)

    def predicted_seconds(self, num_micro_batches=None, order=None):
        """How long the passes of a step would take; see :meth:`predict`."""
        return max(end for _, end in self.predict(num_micro_batches, order).values())

    def memory(self, stage):
        """Bytes that this stage is predicted to need: parameters, gradients and what it holds of the micro-batches.

        Without the optimizer's state and the operators' temporary memory; None where the activations are not known.
        """
        if self.activations[stage] is None:
            return None
        held, once = (self._inputs, self.activations[stage]) if self.recompute else (self.activations, 0)
        return self.parameters[stage] + self.num_held[stage] * held[stage] + once

    def __str__(self):
        num, num_stages = self.num_micro_batches, len(self.parameters)
        lines = [
            f"{num_stages} stages, {num} micro-batches, order {self.order}: {self.seconds * 1e3:.1f} ms, predicted "
            f"{self.predicted_seconds() * 1e3:.1f}; idle {self.idle:.0%}, predicted {bubble(num_stages, num):.0%}",
            "stage  forward, ms  backward, ms  parameters and gradients, MB  activations, MB  held  together, MB",
        ]
        for stage in range(num_stages):
            forward, backward = (self.duration(stage, kind) * 1e3 for kind in (FORWARD, BACKWARD))
            lines.append(
                f"{stage:5}  {forward:11.2f}  {backward:12.2f}  {self.parameters[stage] / 1e6:28.2f}"
                f"  {_megabytes(self.activations[stage]):>15}  {self.num_held[stage]:4}"
                f"  {_megabytes(self.memory(stage)):>12}"
            )
        lines.append("micro-batches  bubble  predicted ms: 1f1b  gpipe")
        for other in sorted({1, 2, 4, 8, 16, num}):
            ours, theirs = (self.predicted_seconds(other, order) * 1e3 for order in ("1f1b", "gpipe"))
            lines.append(f"{other:13}  {bubble(num_stages, other):6.0%}  {ours:18.1f}  {theirs:5.1f}")
        return "\n".join(lines)

    def draw(self, path):
        """Draw the measured passes of each device and, below, the predicted ones, as a picture (PNG, PDF, SVG).

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
        figure = Figure(figsize=(10, 1.2 + 0.45 * len(rows)), layout="constrained", facecolor="white")
        axes = figure.subplots()
        for place, (_, passes, stage) in enumerate(rows):
            for task, (begin, end) in passes.items():
                if task.stage == stage:
                    colour = "#4363d8" if task.kind == FORWARD else "#e6a04b"
                    axes.barh(place, (end - begin) * 1e3, left=begin * 1e3, color=colour, edgecolor="white", height=0.8)
                    middle = (begin + end) / 2 * 1e3
                    axes.text(middle, place, task.micro_batch, ha="center", va="center", fontsize=7, clip_on=True)
        axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axes.set(xlabel="ms", ylim=(len(rows) - 0.4, -0.6))
        title = f"forward (blue) and backward (orange) passes, order {self.order}: idle {self.idle:.0%}"
        axes.set_title(title, loc="left", fontweight="bold")
        figure.savefig(path, dpi=120)


def _megabytes(count):
    return "?" if count is None else f"{count / 1e6:.2f}"


def parameter_bytes(block):
    """Bytes of a block's parameters and of their gradients."""
    return sum(
        _size(one.shape, np.dtype(one.dtype)) * (1 + (one.grad_req != "null"))
        for one in block.collect_params().values()
    )


def _size(shape, dtype):
    return int(np.prod(shape)) * dtype.itemsize


def activation_bytes(block, inputs):
    """Bytes of all arrays that the operators of a HybridBlock return; None for another block.

    Args:
        block: the stage.
        inputs: list of (shape, dtype).
    """
    if not isinstance(block, mx.gluon.HybridBlock) or mx.util.is_np_array():
        return None
    names = [f"data{number}" for number in range(len(inputs))]
    outputs = block(*map(mx.sym.var, names))
    graph = mx.sym.Group(list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]).get_internals()
    _, shapes, _ = graph.infer_shape(**{name: shape for name, (shape, _) in zip(names, inputs)})
    variables = {*graph.list_arguments(), *graph.list_auxiliary_states()}
    sizes = [np.prod(shape) for name, shape in zip(graph.list_outputs(), shapes) if name not in variables]
    return int(sum(sizes)) * inputs[0][1].itemsize
