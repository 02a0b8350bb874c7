"""Records of exchanges that run inside a library: begun when their arrays are ready, done when their results are there.

The library says neither. So a function in MXNet's engine is queued before it, behind the arrays that it will read, and
another one after it, behind those that it writes. Nobody waits for them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

from ...engine import Call
from ...native import address
from ...native.records import C, address_of
from .ring import RECORDER

_records: list = []  # of all exchanges: the engine may have their functions still queued when their store is gone


_FUNCTIONS = address("gp_recorded_begin"), address("gp_recorded_end")


class StoreRecords:
    """What one store exchanges.

    Args:
        number: of the store, among those of this process whose keys would be taken for each other's.
    """

    def __init__(self, number: int = 0) -> None:
        self._number = number
        self._keys: dict = {}  # kind, key -> number of its name, numbers of its calls, its exchanges

    def begin(self, kind: str, key: Hashable, values: Sequence[Any], outs: Sequence[Any]) -> ExchangeRecord:
        """Record that an exchange begins when `values` are ready; call this before it is queued.

        Args:
            kind: a letter of the recorder's names, such as "s" for a sum.
            key: a number or a name.
            values, outs: sequences of the NDArrays that it reads, and of those that it writes.

        Returns:
            The exchange, whose ``end()`` is to be called when it is queued.
        """
        number, calls, exchanges = self._keys.get((kind, key)) or self._open(kind, key)
        call = next(calls)
        for exchange in exchanges:
            if not exchange.record.busy:
                break
        else:
            exchange = ExchangeRecord(number)
            exchanges.append(exchange)
        exchange.begin(values, outs, call)
        return exchange

    def _open(self, kind: str, key: Hashable) -> tuple[int, Iterator[int], list[ExchangeRecord]]:
        name = f"{self._number}{kind}:{key}".encode()
        self._keys[kind, key] = RECORDER.number_of(*RECORDER.kind_key_label(name)), itertools.count(1), []
        return self._keys[kind, key]


class ExchangeRecord:
    """One exchange at a time of one key and kind; there are several if they are under way at once."""

    def __init__(self, name: int) -> None:
        self.record = C.RecordedExchange(place=address_of(RECORDER.place), name=name)
        _records.append(self.record)
        self._arrays: list = []  # of the last time

    def begin(self, values: Sequence[Any], outs: Sequence[Any], call: int) -> None:
        """Record call number `call` when `values` are ready."""
        self.record.busy, self.record.call, self.record.record = 1, call, 0
        arrays = [*values, None, *outs]  # None: one that was read may be written this time
        if len(arrays) != len(self._arrays) or not all(map(operator.is_, arrays, self._arrays)):
            self._begin, self._end = (
                Call(function, address_of(self.record), list(those), [], "gluon_parallel.flight_recorder")
                for function, those in zip(_FUNCTIONS, (values, outs))
            )
            self.record.size = sum(int(np.prod(one.shape)) * np.dtype(one.dtype).itemsize for one in outs[:1])
            self._arrays = arrays
        self._begin.push()

    def end(self) -> None:
        """Record that it is done when its results are there."""
        self._end.push()
