"""What MXNet keeps per thread (recording, scopes, NumPy mode), copied from one thread to another."""

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


def _flags():
    """The three flags of MXNet's C library that belong to this thread: recording, training, and NumPy shapes.

    Example:
        >>> with mx.autograd.record(train_mode=False):
        ...     _flags()
        (1, 0, 0)
    """
    recording, training, shapes = ctypes.c_bool(), ctypes.c_bool(), ctypes.c_int()
    _LIB.MXAutogradIsRecording(ctypes.byref(recording))
    _LIB.MXAutogradIsTraining(ctypes.byref(training))
    _LIB.MXIsNumpyShape(ctypes.byref(shapes))
    return int(recording.value), int(training.value), shapes.value


def _set_flags(recording, training, shapes):
    """Set this thread's flags to what :func:`_flags` returned in another thread."""
    previous = ctypes.c_int()
    _LIB.MXAutogradSetIsRecording(recording, ctypes.byref(previous))
    _LIB.MXAutogradSetIsTraining(training, ctypes.byref(previous))
    _LIB.MXIsNumpyShape(ctypes.byref(previous))
    if previous.value != shapes and shapes < 2:  # 2: it is on in all threads
        _LIB.MXSetIsNumpyShape(shapes, ctypes.byref(previous))


class State:
    """All of it: the flags, and the scopes of MXNet's Python code (names, attributes, default device, NumPy arrays)."""

    def __init__(self):
        self._flags = _flags()
        self._scopes = [vars(scope).copy() for scope in _SCOPES]

    def apply(self):
        """Give this thread the state of the thread that made this object."""
        _set_flags(*self._flags)
        for scope, values in zip(_SCOPES, self._scopes):
            vars(scope).clear()
            vars(scope).update(values)
