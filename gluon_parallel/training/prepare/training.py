"""Training that ``prepare`` returns: steps, evaluates, prints and saves for all processes."""

import os
from pathlib import Path
from typing import Any, Union

import numpy as np

from ...data_parallel import DataParallel
from ...errors import CheckpointError
from ...metrics import evaluate, gather
from .. import checkpoint
from ..progress import Position, Progress
from ..seeding import reseed

_STATE = "training"  # the name of the values that are not the caller's


class Training:
    """A net in training on all devices and processes; made by :func:`prepare`.

    Attributes:
        store: the KVStore through which the processes meet; ``rank`` and ``num_workers`` are its.
        devices: of this process.
        net, trainer: as they were handed over.
        num_steps: calls of :meth:`step`, those before the checkpoint that was resumed included.
    """

    def __init__(self, parallel: DataParallel, store: Any, loaders: list[Any], seed: int) -> None:
        self.store, self.devices = store, parallel.devices
        self.net, self.trainer = parallel.net, parallel.trainer
        self.num_steps = 0
        self._parallel, self._loaders, self._seed = parallel, loaders, seed
        self._saved = "Nothing has been saved yet"
        self._begin_losses()
        self._reseed(self.num_steps - 1)

    def __repr__(self) -> str:
        parts = (self.store.num_workers, "process", "es"), (len(self.devices), "device", "s")
        return " x ".join(f"{count} {word}{more if count > 1 else ''}" for count, word, more in parts)

    def step(self, x: Any, y: Any = ()) -> Any:
        """Train on one batch, of which this process has its part; arguments and return of ``DataParallel.step``.

        Raises:
            NotFinite: the loss of this step or one of the eight before it is NaN or infinite.
        """
        self._reseed(self.num_steps)  # before the step: an evaluation draws numbers too, where a net has dropout
        loss = self._parallel.step(x, y)
        self.num_steps += 1
        self._losses.add(loss, self._parallel.num_samples)
        return loss

    def mean_loss(self) -> float:
        """The mean loss over all samples of all processes since the last call; every process must call it."""
        loss, _rate, _parts = self._losses.together(self.store)
        self._begin_losses()
        return loss

    def evaluate(self, loader: Any, metric: Any) -> list[tuple[str, float]]:
        """``gp.evaluate`` over the batches of all processes, for a loader of :func:`prepare`; all must call it."""
        return evaluate(self.net, loader, metric, self.devices, self.store)

    def print(self, *values: Any) -> None:
        """Print on process 0."""
        if self.store.rank == 0:
            print(*values, flush=True)

    def save(self, path: Union[str, os.PathLike], **own: Any) -> None:
        """Write to a file what :meth:`resume` needs, and values of the script's own, see ``gp.checkpoint.save``.

        Every process must call it; process 0 writes.
        """
        if _STATE in own:
            raise CheckpointError(f"the name {_STATE!r} is taken by prepare; save the value under another one")
        self._parallel.update()  # what is accumulated is in no file
        position = {"steps": self.num_steps, "seed": self._seed, "epochs": [one.epoch for one in self._loaders]}
        checkpoint.save(path, self.net, self.trainer, **own, **{_STATE: position})
        self._saved = f"The last checkpoint is {path}"

    def resume(self, path: Union[str, os.PathLike], **start: Any) -> dict[str, Any]:
        """Continue from a file of :meth:`save`, if it is there: weights, optimizer, order of samples, random numbers.

        Every process must call it, and must see the same file. A process that was started again after a failure goes
        on from the last :meth:`save` by itself; to begin anew, delete the file or name another.

        Args:
            path: the file.
            start: the script's values for a new training, such as ``epoch=0``.

        Returns:
            `start`, with the values that were saved in place of those if there is a file.

        Raises:
            CheckpointError: some processes do not see the file, or another one; it is damaged; or it belongs to
                another net, optimizer, seed or number of loaders.
        """
        gather(np.zeros((1, 1)), self.store)  # process 0 comes here when it has written what it saves
        there = gather(np.array([[float(Path(path).exists())]]), self.store)
        if not there.any():
            return start
        if not there.all():
            missing = ", ".join(map(str, np.flatnonzero(there[:, 0] == 0)))
            raise CheckpointError(
                f"{path} is there for some processes and not for {missing}; put it into a folder that all hosts share"
            )
        own = checkpoint.load(path, self.net, self.trainer)
        position = own.pop(_STATE, None)
        if position is None or len(position["epochs"]) != len(self._loaders) or position["seed"] != self._seed:
            raise CheckpointError(
                f"{path} was not saved by this training: it has another seed or other loaders, or gp.checkpoint.save "
                "wrote it; gp.checkpoint.load reads such a file"
            )
        self.num_steps, self._saved = position["steps"], f"The last checkpoint is {path}"
        for loader, epoch in zip(self._loaders, position["epochs"]):
            loader.set_epoch(epoch)
        self._begin_losses()
        self._reseed(self.num_steps - 1)
        self.print(f"continuing {path}: {', '.join(f'{name}={own[name]}' for name in start if name in own)}")
        return {**start, **own}

    def _reseed(self, step: int) -> None:
        """Random numbers of a step, and of what augments the batch after it, follow from its number."""
        reseed(self._seed + self.store.rank, step=step)

    def _begin_losses(self) -> None:
        self._losses = Progress((), "training", Position(step=self.num_steps), lambda: self._saved)
