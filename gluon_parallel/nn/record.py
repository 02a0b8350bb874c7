"""The record that an operator's compiled passes work on, and what Python does for them where one needs help."""

from __future__ import annotations

import ctypes
import functools
import threading
import traceback
from typing import Any

import numpy as np

from ..compat import mx
from ..errors import BarrierBroken
from ..kvstore.shared import FUTEX
from ..moments import channel_shape

_MOMENT = 0.1  # seconds after which a meeting is left to Python
_DIRECTIONS = "forward", "backward"

_address = ctypes.c_void_p
_Help = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)

_lock = threading.RLock()
# Compiled code hands an address over, and MXNet holds an operator by it alone; so both are kept here.
_records: dict[int, Record] = {}  # address -> record, as long as MXNet has the operator
_helpers: list[Any] = []  # functions that compiled code has the address of


def once(function):
    """`functools.cache` for what others keep the address of: made by one thread, as a second one would be freed."""
    cached = functools.cache(function)

    @functools.wraps(function)
    def locked(*args):
        with _lock:
            return cached(*args)

    return locked


class Record:
    """One call site of one layer on one device.

    Args:
        settings: of the operator.
        place: of the layer.
        device: name of the device.
        shape: of the input.
    """

    def __init__(self, settings, place, device, shape):
        code = callbacks()
        outer, channels, inner = channel_shape(shape, settings.axis)
        self.place, self.device = place, device
        self.error: Any = None  # of the help that it was given last
        self.contexts: Any = None  # what MXNet hands to each of its passes
        words = self.words = np.zeros(code.num_words(channels), np.int64)
        words[code.LIBRARY], words[code.LAYER] = library().ctypes.data, place.lane.words.ctypes.data
        words[code.NUMBER] = place.lane.number(device)
        words[code.CALLS] = place.barrier.count(device).ctypes.data
        words[code.OUTER], words[code.CHANNELS], words[code.INNER] = outer, channels, inner
        words[code.FIX_GAMMA], words[code.CONSTANT] = settings.fix_gamma, settings.use_global_stats
        reals = words.view(np.float64)
        reals[code.MOMENTUM], reals[code.EPSILON] = settings.momentum, settings.epsilon
        self.address = words.ctypes.data
        _records[self.address] = self

    def meet(self, key, where):
        """The meeting at `key` in Python; the values at that address become those of the whole batch."""
        values = self._values(key, where)
        since = self.words[callbacks().CAME_AT] / 1e9
        values[:] = self.place.meet(_named(key), self.device, values.copy(), since)

    def exchange(self, key, where):
        """The same for the other processes."""
        try:
            values = self._values(key, where)
            values[:] = self.place.gather(_named(key), values.copy())
        except Exception as error:
            self.place.barrier.close(error)
            raise

    def fail(self, what, where):
        """The arrays that the pass should have written, of the handles at that address, tell whoever waits for them."""
        code = callbacks()
        kind, direction = divmod(what, 2)
        handles = ctypes.cast(where, ctypes.POINTER(_address))
        arrays = [mx.nd.NDArray(_address(handles[i]), writable=True) for i in range(*code.OUTPUTS[direction])]
        error, self.error = self.error, None
        if kind == code.NO_MEMORY:
            error = mx.base.MXNetError(mx.base.py_str(mx.base._LIB.MXGetLastError()))
        elif kind == code.NO_FORWARD:
            error = BarrierBroken(f"{self.place.name}: the backward pass of a forward pass that failed")
        self.place.callback_failed(error, arrays)

    def _values(self, key, where):
        size = 2 * int(self.words[callbacks().CHANNELS]) + (1 if key % 2 == 0 else 0)
        return np.ctypeslib.as_array((ctypes.c_double * size).from_address(where))


def forget(address):
    """The operator is gone."""
    _records.pop(address, None)


def _named(key):
    call, direction = divmod(key, 2)
    return _DIRECTIONS[direction], call


def _helping(function):
    """A C function of (address of a record, two more words): 0, or 1 after an exception, which the record keeps."""

    def run(address, first, second):
        record = None
        try:
            record = _records[address]
            function(record, first, second)
            return 0
        except Exception as error:
            if record is None or function is Record.fail:
                traceback.print_exc()  # nobody else will say it
            else:
                record.error = error
            return 1

    _helpers.append(_Help(run))
    return _helpers[-1]


@once
def callbacks():
    """The compiled code."""
    from . import callbacks as code  # here: Numba takes its time

    return code


@once
def library():
    """What compiled code calls, as a record."""
    from . import meeting as code

    words = np.zeros(code.NUM_LIBRARY_WORDS, np.int64)
    libc, mxnet = ctypes.CDLL(None), mx.base._LIB
    for word, function in (
        (code.SYSCALL, libc.syscall), (code.YIELD, libc.sched_yield), (code.CLOCK, libc.clock_gettime),
        (code.GET_DATA, mxnet.MXNDArrayGetData), (code.FREE, mxnet.MXNDArrayFree),
        (code.MEET, _helping(Record.meet)), (code.EXCHANGE, _helping(Record.exchange)),
        (code.FAIL, _helping(Record.fail)),
    ):  # fmt: skip
        words[word] = ctypes.cast(function, _address).value or 0
    words[code.FUTEX] = FUTEX
    words[code.SECONDS], words[code.NANOSECONDS] = 0, int(_MOMENT * 1e9)
    return words
