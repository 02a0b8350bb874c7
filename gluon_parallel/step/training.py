"""What ``DataParallel`` and ``Pipeline`` say of the steps that they have made, and updates between steps."""

from __future__ import annotations

from typing import Any

from ..mxnet.compat import mx
from .label_checks import LabelCheck
from .training_step import TrainingStep


class Training:
    """Base of ``DataParallel`` and ``Pipeline``, which make the steps; a pipeline has none before its first one."""

    _step: TrainingStep | None = None
    _label_check: LabelCheck | None = None

    @property
    def num_samples(self) -> int:
        """Of the last step, in this process."""
        return 0 if self._step is None else self._step.num_samples

    @property
    def mean(self) -> mx.nd.NDArray | None:
        """What the last step returned or, if its update has failed, would have returned."""
        return None if self._step is None else self._step.mean

    @property
    def loss_scaling(self) -> Any:
        """The loss scale of mixed precision, see :class:`LossScaling`."""
        return None if self._step is None else self._step.loss_scaling

    @property
    def parts(self) -> dict[str, mx.nd.NDArray]:
        """Of the last step, the value of each part of a loss that has some, over all processes.

        {name: array of one value}; reading them waits for that step's forward pass.
        """
        return {} if self._step is None or self._step.sums is None else self._step.sums.values

    @property
    def gradient_norm(self) -> mx.nd.NDArray | None:
        """With `clip_global_norm`, the norm before clipping of the gradient of the mean loss, at the last update.

        Of all parameters together, over all devices and processes; an array of one value, (1,) float32, that nobody has
        waited for. None before the first update and without `clip_global_norm`, where ``math.inf`` clips nothing.
        """
        return None if self._step is None else self._step.gradient_norm

    @property
    def has_accumulated(self) -> bool:
        """Whether there are steps that no update has had yet; the same on all processes."""
        return self._step is not None and self._step.has_accumulated()

    def update(self) -> None:
        """Update with the gradients accumulated so far; :meth:`step` does when they are complete.

        Call it at the end of an epoch whose number of batches is no multiple of `accumulate`, or to be sure of the
        weights: it waits for them. NotFinite: one of them is NaN or infinite. BatchMismatch: a label was no class.
        """
        if self._step is not None:
            if self._label_check is not None:
                self._label_check.finish(self._step.number)
            self._step.finish()
