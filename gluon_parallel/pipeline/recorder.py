"""Recorder of when the passes of a pipeline's step begin and end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ..compat import mx
from ..engine import push
from .orders import FORWARD, Task

ArrayForm = tuple[tuple[int, ...], np.dtype]  # shape, dtype


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
