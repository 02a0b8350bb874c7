"""What MXNet keeps per thread (recording, scopes, NumPy mode), copied from one thread to another."""

from ..compat import mx

# Objects of threading.local whose attribute `value` is the innermost scope of the thread.
_SCOPES = (
    mx.name.NameManager._current,
    mx.attribute.AttrScope._current,
    mx.util._NumpyArrayScope._current,
    mx.gluon.block._BlockScope._current,
    mx.Context._default_ctx,
)


class State:
    """The flags of MXNet's C library, and the scopes of its Python code (names, attributes, default device, ...)."""

    def __init__(self) -> None:
        self._flags = mx.autograd.is_recording(), mx.autograd.is_training(), mx.util.is_np_shape()
        self._scopes = [vars(scope).copy() for scope in _SCOPES]

    def apply(self) -> None:
        """Give this thread the state of the thread that made this object."""
        for scope, values in zip(_SCOPES, self._scopes):
            vars(scope).clear()
            vars(scope).update(values)
        recording, training, shapes = self._flags
        mx.autograd.set_recording(recording)
        mx.autograd.set_training(training)
        if mx.util.is_np_shape() != shapes:  # after the scopes: MXNet refuses NumPy arrays without these shapes
            mx.util.set_np_shape(shapes)
