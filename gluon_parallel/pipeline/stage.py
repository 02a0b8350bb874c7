"""One stage: where its parameters are, and its forward and backward passes, one micro-batch after the other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Callable

import numpy as np

from ..allreduce.gradients import flags
from ..errors import GluonParallelError, PipelineMismatch
from ..mxnet.arrays import has_graph, set_fresh, swap
from ..mxnet.blocks import traced_graph
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import BFLOAT16, Nested, as_class_of, as_legacy, as_tuple, leaves, set_zero, to_device
from ..mxnet.device_threads.seeds import seed_of_device, seed_this_thread
from ..mxnet.engine import order, push
from ..mxnet.parameters import devices_of_values, has_values, initialize_on, share_copies
from ..nn.sync_batch_norm.participants import STATISTICS, waiting_sync_groups
from ..step.precision import active_precision
from .orders import BACKWARD, FORWARD, Task

Arrays = tuple[mx.nd.NDArray, ...]  # with None in the place of an array that has no gradient
ArrayForm = tuple[tuple[int, ...], np.dtype]  # shape, dtype

# What MXNet raises for inputs that a block, or a loss, cannot take.
INPUT_ERRORS = (mx.base.MXNetError, TypeError, AssertionError, ValueError)


class Recorder:
    """Notes in the engine when the passes of one replica begin and end."""

    def __init__(self) -> None:
        self.begins: dict[Task, float] = {}  # seconds of ``time.perf_counter()``
        self.ends: dict[Task, float] = {}
        self.inputs: dict[int, list[ArrayForm]] = {}  # stage -> shapes and types of the first micro-batch's inputs

    def begin(self, task: Task, arrays: Sequence[mx.nd.NDArray]) -> None:
        """Note when `arrays`, on which `task` works, are ready; nothing that is launched later uses them before."""
        if task.kind == FORWARD:
            self.inputs.setdefault(task.stage, [(array.shape, np.dtype(array.dtype)) for array in arrays])
        if arrays:
            push(lambda: self.begins.setdefault(task, time.perf_counter()), write=arrays, name="begin")

    def end(self, task: Task, results: Sequence[mx.nd.NDArray]) -> None:
        """Note when the last of `results` is ready."""
        for array in results:
            push(lambda: self.ends.__setitem__(task, time.perf_counter()), read=[array], name="end")


class Stage:
    """One stage of one replica during a step.

    The engine runs an operator as soon as its inputs are there, in whatever order the micro-batches' operators become
    ready. So that this device works on one pass after the other, in the order in which they are launched, the inputs of
    a pass become ready only after the results of the pass before (:func:`.engine.order`).

    `blocks` and `devices` are those of all stages; on its own device the block has a copy of its parameters.
    """

    def __init__(
        self,
        number: int,
        blocks: Sequence[mx.gluon.Block],
        devices: Sequence[mx.Context],
        recorder: Recorder | None = None,
    ) -> None:
        self.blocks, self.device = blocks, devices[number]
        self.number, self._recorder = number, recorder
        self._next = devices[number + 1] if number + 1 < len(devices) else None
        self._previous = devices[number - 1] if number else None
        parameters = blocks[number].collect_params().values()
        self._gradients = [one.grad(self.device) for one in parameters if one.grad_req != "null"][:1]
        self._constants = [one.data(self.device) for one in parameters if one.grad_req == "null"]
        self._statistics = [one.data(self.device) for one in parameters if one.name.endswith(STATISTICS)]
        self._inputs: dict[int, Arrays] = {}  # micro-batch -> arrays
        self._outputs: dict[int, Arrays] = {}  # micro-batch -> arrays with the graphs that made them
        self._last: Sequence[mx.nd.NDArray] = []  # results of the last pass

    def forward(
        self, micro_batch: int, inputs: Arrays, run: Callable[..., Arrays], keep: bool = True, seed: int | None = None
    ) -> tuple[Arrays, Arrays | None]:
        """A forward pass, ``run(*inputs)``; like the next ones, to be called from the thread of the device.

        Without `keep`, :meth:`backward` computes the activations again; `seed` is that of the random numbers, None for
        those that come next. The inputs share memory with no other array.
        Returns the outputs, and copies of them on the next stage's device (None for the last stage).
        """
        task = Task(self.number, FORWARD, micro_batch)
        self._begin(inputs, task)
        self._inputs[micro_batch] = inputs
        if keep:
            outputs = self._outputs[micro_batch] = self._recorded(inputs, run, seed)
        else:
            before = [(array, array.copy()) for array in self._statistics]
            self._seed(seed)
            outputs = run(*inputs)
            for array, value in before:  # a layer that changes them in its forward pass does so when it is recomputed
                value.copyto(array)
        self._end([output.detach() for output in outputs], task)
        return outputs, self._next and moved(outputs, self._next)

    def backward(
        self, micro_batch: int, heads: Arrays, run: Callable[..., Arrays], seed: int | None = None
    ) -> Arrays | None:
        """A backward pass from the outputs' gradients `heads`; `run` and `seed` as they were in the forward pass.

        Returns copies of the inputs' gradients on the device of the stage before (None for the first stage).
        """
        task = Task(self.number, BACKWARD, micro_batch)
        inputs = self._inputs.pop(micro_batch)
        outputs = self._outputs.pop(micro_batch, None)
        is_recomputed = outputs is None
        if outputs is None:
            self._begin(inputs, task)
            outputs = self._recorded(inputs, run, seed)
            self._end([output.detach() for output in outputs])
        reached: dict[int, tuple[mx.nd.NDArray, mx.nd.NDArray]] = {}  # by the array: MXNet takes one head for each
        for output, head in zip(outputs, heads):
            if head is not None and has_graph(output):
                known = reached.get(id(output))
                reached[id(output)] = output, head if known is None else known[1] + head
        self._begin([head for _, head in reached.values()], None if is_recomputed else task)
        if reached:
            mx.autograd.backward(*map(list, zip(*reached.values())))
        gradients = tuple(array.grad if self._has_gradient(array) else None for array in inputs)
        self._end([array for array in gradients if array is not None] + self._gradients, task)
        return self._previous and moved(gradients, self._previous)

    def infer(self, inputs: Arrays) -> tuple[Arrays, Arrays | None]:
        """A forward pass of the block alone; returns what :meth:`forward` does."""
        self._begin(inputs)
        outputs = self.call(*inputs)
        self._end([output.detach() for output in outputs])
        return outputs, self._next and moved(outputs, self._next)

    def call(self, *inputs: mx.nd.NDArray) -> Arrays:
        """The outputs of the block, a tuple; see :func:`outputs_of`."""
        return outputs_of(self.blocks, self.number, inputs)

    def _begin(self, arrays: Sequence[mx.nd.NDArray], task: Task | None = None) -> None:
        """Have operators that work on these arrays start after the pass before."""
        for last in self._last:
            order([last], arrays)
        if self._recorder is not None and task is not None:
            self._recorder.begin(task, arrays)

    def _end(self, results: Sequence[mx.nd.NDArray], task: Task | None = None) -> None:
        self._last = results
        if self._recorder is not None and task is not None:
            self._recorder.end(task, results)

    def _recorded(self, inputs: Arrays, run: Callable[..., Arrays], seed: int | None) -> Arrays:
        self._seed(seed)
        for array in self._constants:
            _leave_graph(array)
        for array in inputs:
            if self._has_gradient(array):
                array.attach_grad()
        with mx.autograd.record():
            return _passed_on(self.blocks[self.number], inputs, run(*inputs))

    def _has_gradient(self, array: mx.nd.NDArray) -> bool:
        """Whether the stage before needs the gradient of this input."""
        return self._previous is not None and np.dtype(array.dtype).kind in "fV"

    def _seed(self, seed: int | None) -> None:
        if seed is not None:
            seed_this_thread(seed_of_device(seed, self.device))


def outputs_of(blocks: Sequence[mx.gluon.Block], number: int, inputs: Arrays, name: str = "stage") -> Arrays:
    """The outputs of the stage with this number, a tuple of arrays.

    What mixed precision leaves in half precision becomes float32, for MXNet expects inputs of a block to be that.
    PipelineMismatch, in which the blocks have that `name`: it fails on its inputs, or returns something else.
    """
    try:
        outputs = as_tuple(blocks[number](*inputs))
    except GluonParallelError:
        raise
    except INPUT_ERRORS as error:
        raise _mismatch(error, number, blocks, inputs, name) from error
    others = [type(one).__name__ for one in outputs if not isinstance(one, mx.nd.NDArray)]
    if others:
        raise PipelineMismatch(
            f"{name} {number} ({type(blocks[number]).__name__}) returned {', '.join(others)}; expected an NDArray, or "
            "a tuple or list of them that is not nested"
        )
    halves = [np.dtype(output.dtype) in (BFLOAT16, np.float16) for output in outputs]
    if not any(halves) or active_precision() is None:
        return outputs
    return tuple(
        mx.nd.amp_cast(output, dtype="float32") if is_half else output for output, is_half in zip(outputs, halves)
    )


def _leave_graph(array: mx.nd.NDArray) -> None:
    """Take an array without a gradient out of earlier graphs, whose backward pass clears what later ones need of it."""
    apart = array.detach()
    swap(array, apart)


def _passed_on(block: mx.gluon.Block, inputs: Arrays, outputs: Arrays) -> Arrays:
    """The outputs; in the place of one that is an unchanged input stands this input, whose graph MXNet has lost."""
    traced = traced_graph(block)
    if not traced or all(map(has_graph, outputs)):
        return outputs
    names, output = [symbol.name for symbol in traced[0]], traced[1]
    symbols = list(output) if len(output.list_outputs()) > 1 else [output]  # one of mx.np is no sequence
    if len(symbols) != len(outputs):
        return outputs
    return tuple(
        inputs[names.index(symbol.name)] if symbol.get_children() is None and symbol.name in names else output
        for symbol, output in zip(symbols, outputs)
    )


def pass_counts(blocks: Iterable[mx.gluon.Block], num_micro_batches: int) -> list[int]:
    """How many passes each stage runs: one per micro-batch, or one of all of them where it has SyncBatchNorm.

    For the moments of the whole batch, each micro-batch would have to wait in every layer for all others.
    """
    return [1 if waiting_sync_groups(block) else num_micro_batches for block in blocks]


def moved(arrays: Arrays, device: mx.Context) -> Arrays:
    """Copies of the arrays on another device, without their graphs; None stays."""
    return tuple(None if array is None else to_device(array.detach(), device) for array in arrays)


def concatenate(parts: Sequence[Arrays], axis: int) -> Arrays:
    """The arrays of several micro-batches, tuples of equal length, as those of one; None stays."""
    return tuple(
        None if arrays[0] is None else as_class_of(mx.nd.concat(*map(as_legacy, arrays), dim=axis), arrays[0])
        for arrays in zip(*parts)
    )


def cut(arrays: Arrays, begin: int, end: int, axis: int) -> Arrays:
    """Copies of the samples from `begin` to `end` of each array; None stays."""
    return tuple(
        None if array is None else as_class_of(mx.nd.slice_axis(as_legacy(array), axis, begin, end), array)
        for array in arrays
    )


def described(arrays: Nested) -> str:
    """How many (nested) arrays, and their shapes and dtypes, in words."""
    arrays = [array for _, array in leaves(arrays)]
    shapes = ", ".join(f"{array.shape} {np.dtype(array.dtype).name}" for array in arrays)
    return f"{len(arrays)} array{'s' if len(arrays) > 1 else ''} of shape {shapes}" if arrays else "nothing"


def reason_of(error: Exception) -> str:
    """The last line of an exception's text, in which MXNet says what is wrong."""
    return (str(error).strip().splitlines()[-1:] or [type(error).__name__])[0].rstrip(".")


def _mismatch(
    error: Exception, number: int, blocks: Sequence[mx.gluon.Block], inputs: Arrays, name: str
) -> PipelineMismatch:
    """The error for a block that failed on its inputs, which the block before it has returned."""
    block = blocks[number]
    weights = [parameter for parameter in block.collect_params().values() if parameter.shape is not None]
    first = f"; its first parameter, {weights[0].name}, has shape {tuple(weights[0].shape)}" if weights else ""
    source = f"what {name} {number - 1} ({type(blocks[number - 1]).__name__}) returned" if number else "its input"
    hint = ""
    if name == "stage" and number == 0 and len(inputs) > 1:
        hint = ". A loader's pair (x, y) is unpacked: step(loss, trainer, *batch)"
    return PipelineMismatch(
        f"{name} {number} ({type(block).__name__}) cannot take {source}: {described(inputs)}{first}. "
        f"{reason_of(error)}{hint}"
    )


class StageDevices(list):
    """The devices of one stage's parameters, one per replica; a list that compares equal to those of other stages.

    A ``gluon.Trainer`` refuses parameters whose device lists differ, and uses only their length.
    """

    def __init__(self, devices: Iterable[mx.Context], pipeline: Any) -> None:
        super().__init__(devices)
        self.pipeline = pipeline

    def move_parameters(self) -> None:
        """Put parameters of the pipeline that have got their values elsewhere on the devices of their stages."""
        self.pipeline._move_parameters()

    def __eq__(self, other: object) -> bool:
        is_ours = isinstance(other, StageDevices) and other.pipeline is self.pipeline
        return is_ours or list.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce__(self) -> tuple[type[list], tuple[list[mx.Context]]]:
        return list, (list(self),)


def move_parameters(
    parameters: Iterable[mx.gluon.Parameter], stage: int, replicas: Sequence[Sequence[mx.Context]], pipeline: Any
) -> None:
    """Put the parameters of a stage on its devices, one for each replica.

    ``parameter.data(device)`` then works for every device of a replica, as trainers and checkpoints need it.
    """
    devices = [replica[stage] for replica in replicas]
    for parameter in parameters:
        if has_values(parameter) and getattr(devices_of_values(parameter), "pipeline", None) is pipeline:
            continue
        if list(parameter.list_ctx()) != devices:
            parameter.reset_ctx(devices)
        if not has_values(parameter):  # deferred: its initialisation makes a plain list, the next call does the rest
            initialize_on(parameter, StageDevices(devices, pipeline))
            continue
        share_copies(parameter, StageDevices(devices, pipeline), replicas)


@contextlib.contextmanager
def accumulating(parameters: Sequence[mx.gluon.Parameter]) -> Iterator[None]:
    """Within this block backward passes add to the parameters' gradients, first zero if an update has used them."""
    marked = []
    try:
        for parameter in parameters:
            for fresh, gradient in zip(flags(parameter), parameter.list_grad()):
                if not fresh:
                    set_zero(gradient)
            marked.append(parameter)
            _mark(parameter, "add")
        yield
    finally:
        for parameter in marked:
            _mark(parameter, parameter.grad_req)


def _mark(parameter: mx.gluon.Parameter, grad_req: str) -> None:
    fresh = flags(parameter)  # which `mark_variables` resets
    mx.autograd.mark_variables(parameter.list_data(), parameter.list_grad(), grad_req)
    for array, flag in zip(parameter.list_data(), fresh):
        set_fresh(array, flag)
