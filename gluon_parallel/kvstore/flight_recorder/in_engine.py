"""Records of exchanges that run inside a library: begun when their arrays are ready, done when their results are there.

The library says neither. So a function in MXNet's engine is queued before it, behind the arrays that it will read, and
another one after it, behind those that it writes. Nobody waits for them.
"""

from __future__ import annotations

import operator

import numpy as np

from ...engine import Call
from ..reserved_keys import FIRST_EXCHANGE
from . import layout
from .ring import RECORDER

_words: list = []  # of all exchanges: the engine may have their functions still queued when their store is gone


class Exchanges:
    """What one store exchanges.

    Args:
        number: of the store, among those of this process whose keys would be taken for each other's.
    """

    def __init__(self, number=0):
        from . import compiled_exchange  # here: half a second for Numba, for those who exchange alone

        self.functions = compiled_exchange.begin.address, compiled_exchange.end.address
        self._number = number
        self._keys: dict = {}  # kind, key -> its exchanges

    def describe(self, key, text):
        """Name the layer or parameter of a key, before the key is used."""
        RECORDER.describe(self._number, key, text)

    def begin(self, kind, key, values, outs):
        """Record that an exchange begins when `values` are ready; call this before it is queued.

        Args:
            kind: a letter of the recorder's names, such as "s" for a sum.
            key: a number or a name.
            values, outs: sequences of the NDArrays that it reads, and of those that it writes.

        Returns:
            The exchange, whose ``end()`` is to be called when it is queued.
        """
        known = self._keys.get((kind, key)) or self._open(kind, key)
        known.num_calls += 1
        for exchange in known.exchanges:
            if not exchange.words[layout.BUSY]:
                break
        else:
            exchange = Exchange(self.functions, known.number)
            known.exchanges.append(exchange)
        exchange.begin(values, outs, known.num_calls)
        return exchange

    def _open(self, kind, key):
        is_gathering = kind == "s" and isinstance(key, int) and key >= FIRST_EXCHANGE
        name = f"{self._number}{'g' if is_gathering else kind}:{key}".encode()
        known = self._keys[kind, key] = _Key(RECORDER.number_of(*RECORDER.kind_key_label(name)))
        return known


class _Key:
    """One key's exchanges of one kind."""

    def __init__(self, number):
        self.number, self.num_calls = number, 0
        self.exchanges: list = []  # one, unless several are under way at once


class Exchange:
    """One exchange at a time of one key."""

    def __init__(self, functions, name):
        self.words = np.zeros(layout.EXCHANGE_WORDS, np.int64)
        _words.append(self.words)
        self.words[layout.WHERE] = RECORDER.where.ctypes.data
        self.words[layout.EXCHANGE_NAME] = name
        address = self.words.ctypes.data
        self._begin, self._end = (_Note(function, address) for function in functions)

    def begin(self, values, outs, call):
        """Record call number `call` when `values` are ready."""
        words = self.words
        words[layout.BUSY], words[layout.EXCHANGE_CALL], words[layout.RECORD] = 1, call, 0
        if self._end.take(outs):
            words[layout.EXCHANGE_SIZE] = sum(np.prod(one.shape) * np.dtype(one.dtype).itemsize for one in outs[:1])
        self._begin.take(values)
        self._begin.push()

    def end(self):
        """Record that it is done when its results are there."""
        self._end.push()


class _Note:
    """A compiled function that is queued behind arrays, which are mostly those of the last time."""

    def __init__(self, function, argument):
        self._arguments = function, argument
        self._arrays: list | None = None

    def take(self, arrays):
        """Stand behind these arrays from now on; returns whether they are others than before."""
        known = self._arrays
        if known is not None and len(known) == len(arrays) and all(map(operator.is_, known, arrays)):
            return False
        self._arrays = list(arrays)
        self._call = Call(*self._arguments, self._arrays, [], "gluon_parallel.flight_recorder")
        return True

    def push(self):
        """Queue the function."""
        self._call.push()
