"""Header of a step: all its small numbers in one vector, which is summed over the processes once per step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..kvstore.contract import contract
from ..kvstore.handshake import FEWER_PASSES, ONE_DIVISOR, ONE_RATE, differ, divided_by
from ..kvstore.reserved_keys import STEP_HEADER
from ..kvstore.work import NumberSum
from ..mxnet.attached import Attached
from ..mxnet.trainers import parameters_of, store_of

NUM_SIGNALS = 3  # by which a training is asked to stop
DIGEST_BITS = 32  # of the weights, and of the first inputs


class StepHeader:
    """The small numbers of the steps of one trainer; a header without parameters serves a loop without a trainer.

    Every process makes it before the first step, and sends it equally often. The sum has the fields of `own`:

    - ``reached`` (parameters,): 1 for each parameter that the losses have reached.
    - ``divisors``, ``rates``, ``passes``, (processes,) each: what each process divides by, its learning rate, and its
      number of backward passes, below 0 if it is smaller than before; each at the index of its rank, 0 if unknown.
    - ``stop`` (NUM_SIGNALS,): how many processes have had each signal.
    - ``newcomer`` (1,): how many processes have heard of the process that joins the training next.
    - ``digest`` (2 * DIGEST_BITS,): how many have each bit of a digest of the weights, and of the first inputs.
    - ``samples`` and ``idle``: how many samples there are, and how many processes without any.

    Args:
        store: the trainer's; None without one.
        num_parameters: of the trainer.
        key: under which it is summed; a store has one header for each number of parameters.

    Attributes:
        own: what this process sends next, a record of these fields. ``stop`` stays, others become 0 when it is sent.
        num_sent: how often it was.
    """

    def __init__(self, store: Any, num_parameters: int = 0, key: int = STEP_HEADER) -> None:
        ours = contract(store)
        self.rank, self._store, self._ranks = ours.rank, store, ours.ranks
        sizes = {"reached": num_parameters, **dict.fromkeys(("divisors", "rates", "passes"), ours.num_workers)}
        sizes.update({"stop": NUM_SIGNALS, "newcomer": 1, "digest": 2 * DIGEST_BITS})
        fields: list[Any] = [(name, "f8", (size,)) for name, size in sizes.items()]
        # `idle` is last: `then` is called if the last value of the sum is above 0.
        self._fields = np.dtype([*fields, ("samples", "f8"), ("idle", "f8")])
        self._flat = np.zeros(self._fields.itemsize // 8)
        self.own: Any = self._flat.view(self._fields)[0]
        self._sum = NumberSum(ours, key, self._flat.size)
        self.num_sent = 0
        self._values: Any = None  # of the sum that was started last, once they are read

    def is_of(self, store: Any) -> bool:
        """Whether it sums over the processes of `store`, which are still those for which it was made."""
        return store is self._store and self._ranks == contract(store).ranks

    def send(self, then: Callable[[], None] | None = None) -> None:
        """Start the sum of what every process has in `own`, ahead of all other exchanges.

        Args:
            then: called in a thread of MXNet's engine, before the sum can be read, if a process is idle.

        Raises:
            WorkersDiffer, WorkerLost: as :meth:`read`, of the sum before.
        """
        if self.num_sent:  # it has arrived, or this sum would wait for it, too
            self.read()
        self._sum.start(self._flat, then)
        self._values = None
        stop = self.own["stop"].copy()
        self._flat[:] = 0
        self.own["stop"] = stop
        self.num_sent += 1

    def read(self) -> Any:
        """Wait for the sum that was started last; returns it, a record.

        Raises:
            WorkersDiffer: processes divide by different numbers, or have different learning rates; or one has made
                fewer backward passes than the others, and than before: it had no samples in the last one, and its
                gradients are those of an earlier pass.
            WorkerLost: another process did not send its part in time.
        """
        if self._values is None:
            self._values = self._sum.wait().view(self._fields)[0]
            rates = self._values["rates"]
            if (rates != rates[0]).any() or self._values["divisors"].any() or self._values["passes"].any():
                self._compare(self._values)
        return self._values

    def abandon(self) -> None:
        """The step that has sent it has failed here: do not call its `then`."""
        self._sum.cancel()

    def _compare(self, sums: Any) -> None:
        passes, kind, ranks = sums["passes"], self._store.type, self._ranks
        if (passes < 0).any() and abs(passes[passes < 0]).min() < abs(passes).max():
            said = {rank: f"make {abs(num):.0f} backward passes" for rank, num in zip(ranks, passes) if num}
            raise differ(f"gluon.Trainer, before one step with {kind!r}", said, FEWER_PASSES)
        for remedy, values, say in (
            (ONE_DIVISOR, sums["divisors"], divided_by),
            (ONE_RATE, sums["rates"], _rate_in_words),
        ):
            known = values[values != 0]
            if known.size and np.ptp(known) > 1e-6 * abs(known).max():  # MXNet's servers may keep float32
                said = {rank: say(value) for rank, value in zip(ranks, values) if value}
                raise differ(f"gluon.Trainer, store {kind!r}", said, remedy)


ZERO_RATE = 1e-30  # a learning rate of 0, which is no missing one; MXNet's servers may keep float32


def _rate_in_words(rate: float) -> str:
    return f"train with the learning rate {0 if abs(rate) < 2 * ZERO_RATE else rate:.6g}"


_headers: Attached[StepHeader] = Attached("header")  # of trainers


def header_of(trainer: Any) -> StepHeader:
    """The header of this trainer's steps over the processes of its store, which is made by now."""
    header = _headers.of(trainer)
    if header is None or not header.is_of(store_of(trainer)):
        header = _headers.set(trainer, StepHeader(store_of(trainer), len(parameters_of(trainer))))
    return header
