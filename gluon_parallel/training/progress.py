"""Progress of one pass over the batches: a bar with loss and samples/s that does not stop the engine."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from types import MappingProxyType
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
from tqdm import tqdm

from ..compat import mx
from ..errors import NotFinite
from ..kvstore.exchange import gather

NO_PARTS: Mapping[str, Any] = MappingProxyType({})
LAG = 8  # steps; the engine stays busy, and a loss that went wrong is noticed soon


class Position(NamedTuple):
    """How far a run has come."""

    epoch: int = 0  # passes that are complete
    step: int = 0  # steps of the next pass that are complete
    loss_sum: float = 0.0  # over the samples of those steps
    num_samples: int = 0
    part_sums: Mapping[str, float] = {}  # likewise, of a loss that has parts


class Progress:
    """Iterate over an epoch's batches; :meth:`add` each step's loss.

    Reading a loss waits until it is computed. So that the engine can work ahead, each is read when eight younger ones
    have been added, and the last ones when :attr:`loss` is asked for. The bar is drawn on a terminal only.

    Args:
        batches: what to iterate over; its length, if it has one, is that of a whole pass.
        description: what the bar and the errors call this pass, such as ``epoch 3``.
        position: where this pass was interrupted; `batches` begins behind it, and the attributes of its names go on.
        saved: returns a sentence without its full stop that says which checkpoint there is, for the errors.

    Example:
        >>> progress = Progress([1.0, 2.0, 6.0], "epoch 1")
        >>> for batch in progress:
        ...     progress.add(mx.nd.array([batch]), num_samples=4)
        >>> progress.loss, progress.step, progress.num_samples
        (3.0, 3, 12)
    """

    def __init__(
        self,
        batches: Iterable[Any],
        description: str,
        position: Position = Position(),  # noqa: B008 - it cannot be changed
        saved: Callable[[], str] = lambda: "Nothing has been saved by this loop",
    ) -> None:
        _epoch, self.step, self.loss_sum, self.num_samples, part_sums = position
        self.part_sums = dict(part_sums)
        self._batches, self._description, self._saved = batches, description, saved
        self._pending: deque[tuple[int, mx.nd.NDArray, int, Mapping[str, mx.nd.NDArray]]] = deque()
        self._samples_here = 0
        self._begin = self._end = time.perf_counter()
        self._bar: Optional[tqdm] = None

    def __iter__(self) -> Iterator[Any]:
        total = len(self._batches) if isinstance(self._batches, Sized) else None
        # disable=None: silent when standard error is not a terminal
        with tqdm(
            desc=self._description, total=total, initial=self.step, unit="step", leave=False, disable=None
        ) as bar:
            self._begin, self._bar = time.perf_counter(), bar
            yield from self._batches

    def add(self, loss: mx.nd.NDArray, num_samples: int, parts: Mapping[str, mx.nd.NDArray] = NO_PARTS) -> None:
        """Count a step.

        Args:
            loss: its mean loss over `num_samples` samples, an array of one value; not waited for.
            parts: what the loss is the sum of, by name, as ``DataParallel.parts`` has it.

        Raises:
            NotFinite: the loss of this step or of one of the eight before it is NaN or infinite; names the step.
        """
        self.step += 1
        self._samples_here += num_samples
        self._pending.append((self.step, loss, num_samples, parts))
        while len(self._pending) > LAG:
            self._read_oldest()
        if self._bar is not None:
            if self.num_samples:
                rate = self._samples_here / (time.perf_counter() - self._begin)
                mean = self.loss_sum / self.num_samples
                self._bar.set_postfix_str(f"loss {mean:.4f}, {rate:.0f} samples/s", refresh=False)
            self._bar.update()

    def _read_oldest(self) -> None:
        step, loss, num_samples, parts = self._pending.popleft()
        value = loss.asnumpy().item()
        if not math.isfinite(value):
            if self._bar is not None:
                self._bar.close()
            raise NotFinite(
                f"{self._description}, step {step}: the loss is {value}. {self._saved()}. "
                "A smaller learning rate is the usual remedy; NaN among the images is the other cause"
            )
        self.loss_sum += value * num_samples
        self.num_samples += num_samples
        for name, part in parts.items():
            self.part_sums[name] = self.part_sums.get(name, 0.0) + part.asnumpy().item() * num_samples

    def settle(self) -> None:
        """Wait for every loss that was added, and read it; NotFinite: one of them is NaN or infinite."""
        while self._pending:
            self._read_oldest()
            self._end = time.perf_counter()

    @property
    def loss(self) -> float:
        """The mean loss over all samples of this pass; waits for the last step."""
        self.settle()
        return self.loss_sum / self.num_samples if self.num_samples else math.nan

    def together(self, store: Any) -> tuple[float, float, dict[str, float]]:
        """The mean loss, the samples per second and the mean of each part of the loss, over all processes.

        Args:
            store: the KVStore through which they meet; each of them must call it.

        Example:
            >>> progress = Progress([], "epoch 1")
            >>> progress.add(mx.nd.array([2.0]), 4, {"classes": mx.nd.array([0.5]), "boxes": mx.nd.array([1.5])})
            >>> loss, rate, parts = progress.together(mx.kv.create("local"))
            >>> loss, parts
            (2.0, {'classes': 0.5, 'boxes': 1.5})
        """
        rate = self.images_per_second  # waits for the last step
        values = np.array([rate, self.num_samples, self.loss_sum, *self.part_sums.values()], np.float64)
        rate, num_samples, *sums = gather(store, "gp.Progress", values).sum(axis=0).tolist()
        loss, *parts = [value / num_samples if num_samples else math.nan for value in sums]
        return loss, rate, dict(zip(self.part_sums, parts))

    @property
    def images_per_second(self) -> float:
        """How many samples were trained on per second of this pass; waits for the last step."""
        self.settle()
        return self._samples_here / max(self._end - self._begin, 1e-9)
