"""Exponential moving average of a net's weights and running statistics."""

import contextlib
from collections.abc import Iterator
from typing import Any, Optional

import numpy as np

from ..archive import Archive, refuse_differences
from ..errors import DevicesMismatch
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_legacy
from ..mxnet.optimizers import num_updates
from ..mxnet.trainers import updates_on_store
from .checkpoint import forms
from .checkpoint.parameters import copies_by_name, copies_for, initialized_parameters, named_copies


class ExponentialMovingAverage:
    """Exponential moving average (EMA) of the weights of a net in training, for evaluation and export.

    Each update takes ``average = decay * average + (1 - decay) * weights``; the first one copies the weights. Running
    statistics of BatchNorm and SyncBatchNorm are averaged as weights are. Every device keeps the average of its own
    copy, in float32 (float64 for float64 weights), so nothing is exchanged: where the weights are equal on all devices
    and processes, so are the averages.

    ``gp.prepare(..., run=run, saved={"average": average})`` saves and restores it, on any number of devices; so do
    ``gp.checkpoint.save(path, net, trainer, average=average)`` and ``load``.

    Args:
        net: a Gluon block, or a pipeline's ``net``.
        trainer: its trainer. With it, :meth:`update` does nothing while the trainer has not updated the weights:
            between accumulated steps, or after a float16 overflow. Without it, every call counts.
        decay: from 0 (the newest weights) to below 1; the average reaches back over about ``1 / (1 - decay)`` updates.
        warmup: use the smaller ``(1 + n) / (10 + n)`` at first, after n updates: the average forgets the first weights
            sooner.

    Attributes:
        num_updates: how often weights were added.

    Raises:
        ValueError: `decay` is outside its range.

    Example:
        >>> net = mx.gluon.nn.Dense(1, in_units=1, use_bias=False)
        >>> net.initialize()
        >>> average = ExponentialMovingAverage(net, decay=0.75)
        >>> for weight in (1.0, 5.0):
        ...     net.weight.set_data(mx.nd.array([[weight]]))
        ...     average.update()
        >>> with average.applied():
        ...     net.weight.data().asnumpy().item()
        2.0
        >>> net.weight.data().asnumpy().item()
        5.0
    """

    def __init__(self, net: mx.gluon.Block, trainer: Optional[mx.gluon.Trainer] = None, decay: float = 0.999,
                 warmup: bool = False) -> None:  # fmt: skip
        if not isinstance(net, mx.gluon.Block):
            raise ValueError(f"net: got a {type(net).__name__}, expected a Gluon block")
        if trainer is not None and not isinstance(trainer, mx.gluon.Trainer):
            raise ValueError(f"trainer: got a {type(trainer).__name__}, expected a gluon.Trainer; write decay=...")
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}, expected 0 or more and less than 1, such as 0.999")
        self.net, self.decay, self.warmup, self.num_updates = net, decay, warmup, 0
        self._trainer, self._trainer_updates, self._is_applied = trainer, 0, False
        self._averages: dict[str, list[mx.nd.NDArray]] = {}  # by the parameter's place in the net; one per device

    def update(self) -> None:
        """Add the weights to the average; call it after every step, on every process. It does not wait.

        Raises:
            RuntimeError: called inside :meth:`applied`.
            CheckpointError: the net has parameters without values.
            DevicesMismatch: the net was moved to other devices.
        """
        self._refuse_while_applied("update()")
        before, self._trainer_updates = self._trainer_updates, self._count()
        counts_itself = self._trainer is None or updates_on_store(self._trainer)  # servers run the optimizer
        if self._trainer_updates == before and not counts_itself:
            return
        with mx.autograd.pause():
            if self.num_updates == 0:
                copies = self._copies().items()
                self._averages = {name: [data.astype(_wide(data.dtype)) for data in values] for name, values in copies}
            else:
                decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates)) if self.warmup else self.decay
                for data, average in self._pairs():
                    change = data.astype(average.dtype, copy=False) - average
                    change *= 1 - decay
                    average += change  # weights that stay are their own average, which rounded products would not be
        self.num_updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Give the net the averages inside a ``with`` statement, and afterwards its weights back, also after an error.

        Before the first update the net keeps its weights. Save and export averaged weights inside::

            with average.applied():
                training.evaluate(test, "acc")
                net.export("averaged")

        Raises:
            RuntimeError: nested; or the net was trained inside, which is lost.
            DevicesMismatch: the net was moved to other devices.
        """
        self._refuse_while_applied("applied()")
        trained, kept = self._count(), []
        try:
            self._is_applied = True
            with mx.autograd.pause():
                for data, average in self._pairs():
                    kept.append((data, data.copy()))
                    average.copyto(data)  # casts
            yield
        finally:
            with mx.autograd.pause():
                for data, value in kept:
                    value.copyto(data)
            self._is_applied = False
        if self._count() != trained:
            raise RuntimeError(
                "the trainer updated the net inside average.applied(), which is undone: only evaluate, save or "
                "export there, and after accumulated steps call training.update() and average.update() before"
            )

    def state(self) -> Archive:
        """The averages and counts, as named arrays; ``gp.checkpoint.save`` calls it."""
        self._refuse_while_applied("saving the average")
        arrays: dict[str, np.ndarray] = {}
        for name, averages in self._averages.items():
            arrays.update(named_copies(name, averages))
        return Archive(arrays, {"num_updates": self.num_updates, "trainer_updates": self._trainer_updates})

    def restore(self, archive: Archive, source: str = "it") -> None:
        """Continue from what :meth:`state` returned, on any number of devices; ``gp.checkpoint.load`` calls it.

        Raises:
            CheckpointError: it is of another architecture; nothing has been changed then.
        """
        self._refuse_while_applied("loading the average")
        forms.check(archive.facts, {"num_updates": forms.COUNT, "trainer_updates": forms.COUNT}, source)
        parameters = self._parameters() if archive.facts["num_updates"] else {}
        copies = copies_by_name(archive)
        wanted = {name: f"{_wide(parameter.dtype)} {tuple(parameter.shape)}" for name, parameter in parameters.items()}
        refuse_differences(wanted, copies, f"{source} has the average of another architecture")
        self._averages = {}
        for name, parameter in parameters.items():
            devices = parameter.list_ctx()
            values = zip(devices, copies_for(len(devices), copies[name]))
            self._averages[name] = [mx.nd.array(value, ctx=device, dtype=value.dtype) for device, value in values]
        self.num_updates, self._trainer_updates = archive.facts["num_updates"], archive.facts["trainer_updates"]

    def _refuse_while_applied(self, what: str) -> None:
        if self._is_applied:
            raise RuntimeError(f"{what} inside average.applied(): the net has the averages there; do it outside")

    def _count(self) -> int:
        return num_updates(self._trainer.optimizer) if self._trainer is not None else 0

    def _parameters(self) -> dict[str, mx.gluon.Parameter]:
        """Every parameter once, also one that layers share."""
        first: dict[int, str] = {}
        return {
            name: one
            for name, one in initialized_parameters(self.net).items()
            if first.setdefault(id(one), name) == name
        }

    def _copies(self) -> dict[str, list[mx.nd.NDArray]]:
        return {name: [as_legacy(data) for data in one.list_data()] for name, one in self._parameters().items()}

    def _pairs(self) -> Iterator[tuple[mx.nd.NDArray, mx.nd.NDArray]]:
        """Every device's copy of every parameter, and its average."""
        for name, copies in self._copies().items() if self._averages else ():
            averages = self._averages.get(name, [])
            here, there = ([one.context for one in arrays] for arrays in (copies, averages))
            if here != there:
                raise DevicesMismatch(
                    f"the parameter {name} is on {here}, its average on {there}: save the average before the net is "
                    "moved, and load it into a new one"
                )
            yield from zip(copies, averages)


def _wide(dtype: Any) -> str:
    return "float32" if dtype in ("float16", "float32", np.float16, np.float32) else "float64"
