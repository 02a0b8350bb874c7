"""Check that labels are classes of the net's outputs, in every step, in the background."""

from __future__ import annotations

import functools
from typing import Any

from ..errors import BatchMismatch
from ..mxnet.blocks import classes_of
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import to_device
from ..mxnet.library import check_call
from ..native import function, keep_after_end
from ..native.records import C, address_of

_await_labels = function("gp_await_labels", 1)


class LabelCheck:
    """Finds labels that are no class: MXNet would silently train on the nearest class, or on the one below a fraction.

    The engine looks at the labels of a step when they are there, mostly at once. A label that is found at once ends
    its step before anything is updated, else a later step.

    Args:
        class_axis: the axis of the outputs that counts classes.
        ignored: a label that is no class and allowed; None if there is none.
        batch_axis: the axis of the labels that counts samples.

    Attributes:
        find: ``find(outputs, labels, step, begin)`` looks at labels on a CPU, those of the samples from `begin` on of a
            batch; the arrays are MXNet's handles. It does not wait. :meth:`act` says what its result, unless 0, means.
    """

    def __init__(self, class_axis: int, ignored: float | None, batch_axis: int) -> None:
        self.options = class_axis, ignored, batch_axis
        has_ignored, value = ignored is not None, ignored or 0.0
        self._record = keep_after_end(C.LabelCheck(class_axis, batch_axis, has_ignored, value))
        self.find = functools.partial(function("gp_look_at_labels", 5), address_of(self._record))

    def look(self, outputs: mx.nd.NDArray, labels: mx.nd.NDArray, step: int, begin: int, waits: bool) -> None:
        """Look at the labels of a step wherever they are; in its first one it `waits` for them."""
        if labels.ctx.device_type == "gpu":
            with mx.autograd.pause():
                labels = to_device(labels, mx.cpu(0))
        if waits:
            labels.wait_to_read()
        if result := self.find(outputs.handle.value, labels.handle.value, step, begin):
            self.act(result, outputs, labels, step, begin)

    def act(self, result: int, outputs: mx.nd.NDArray, labels: mx.nd.NDArray, step: int, begin: int) -> None:
        """After ``find`` has returned something: BatchMismatch, if a label is no class; does not wait."""
        if result == C.NOT_ON_HOST:
            self.look(outputs, labels, step, begin, waits=False)
        elif result == C.FOUND_LABEL:
            self._refuse(step)
        else:
            check_call(result)

    def finish(self, step: int) -> None:
        """After a `step` that may have been the last: wait for all looks; BatchMismatch as of :meth:`act`."""
        while _await_labels(address_of(self._record)):
            pass
        if self._record.found == C.FOUND_LABEL:
            self._refuse(step + 1)

    def _refuse(self, step: int) -> None:
        found, num, (_, ignored, _) = self._record, self._record.num_classes, self.options
        value, is_whole = f"{found.value:.12g}", found.value % 1 == 0
        is_allowed = "" if ignored is None else f" (or {ignored:g}, which is left out)"
        advice = (
            "Number the classes from 0, or give the net more outputs"
            if is_whole
            else "Give the number of the class; for probabilities, take SoftmaxCrossEntropyLoss(sparse_label=False)"
        )
        if is_whole and ignored is None:
            advice += ". To ignore a sample, give the loss a sample_weight of 0 for it"
        late = "" if found.step == step else ". Updates since that step have used it: go back to a checkpoint"
        message = (
            f"step {found.step}: the label of sample {found.sample} (from 0) of this process's batch is {value}, "
            f"which is no class: the net has {num} outputs, for the classes 0 to {num - 1}{is_allowed}. {advice}{late}"
        )
        found.found = C.NO_FINDING  # a loop may go on without this batch
        raise BatchMismatch(message)


def label_check_of(loss: Any, batch_axis: int, known: LabelCheck | None = None) -> LabelCheck | None:
    """The check for a loss whose labels are numbers of classes, which may be one that is `known`; None for others."""
    classes = classes_of(loss)
    if classes is None:
        return None
    options = *classes, batch_axis
    return known if known is not None and known.options == options else LabelCheck(*options)
