"""What MXNet keeps per thread (recording, scopes, NumPy mode), copied from one thread to another."""

from __future__ import annotations

import ctypes

from ..compat import mx

_LIB = mx.base._LIB

# Objects of threading.local whose attribute `value` is the innermost scope of the thread.
_SCOPES = (
    mx.name.NameManager._current,
    mx.attribute.AttrScope._current,
    mx.util._NumpyArrayScope._current,
    mx.gluon.block._BlockScope._current,
    mx.Context._default_ctx,
)


class Flags:
    """The three flags of MXNet's C library that belong to a thread: recording, training, and NumPy shapes.

    Example:
        >>> with mx.autograd.record(train_mode=False):
        ...     Flags.of_this_thread().values
        (1, 0, 0)
    """

    __slots__ = ("values",)

    def __init__(self, values):
        self.values = values

    @classmethod
    def of_this_thread(cls):
        """Read them."""
        recording, training, shapes = ctypes.c_bool(), ctypes.c_bool(), ctypes.c_int()
        _LIB.MXAutogradIsRecording(ctypes.byref(recording))
        _LIB.MXAutogradIsTraining(ctypes.byref(training))
        _LIB.MXIsNumpyShape(ctypes.byref(shapes))
        return cls((int(recording.value), int(training.value), shapes.value))

    def apply(self):
        """Set this thread's flags to these."""
        previous = ctypes.c_int()
        recording, training, shapes = self.values
        _LIB.MXAutogradSetIsRecording(recording, ctypes.byref(previous))
        _LIB.MXAutogradSetIsTraining(training, ctypes.byref(previous))
        _LIB.MXIsNumpyShape(ctypes.byref(previous))
        if previous.value != shapes and shapes < 2:  # 2: it is on in all threads
            _LIB.MXSetIsNumpyShape(shapes, ctypes.byref(previous))


class State:
    """All of it: the flags, and the scopes of MXNet's Python code (names, attributes, default device, NumPy arrays)."""

    def __init__(self):
        self._flags = Flags.of_this_thread()
        self._scopes = [vars(scope).copy() for scope in _SCOPES]

    def apply(self):
        """Give this thread the state of the thread that made this object."""
        self._flags.apply()
        for scope, values in zip(_SCOPES, self._scopes):
            vars(scope).clear()
            vars(scope).update(values)
