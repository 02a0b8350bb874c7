"""What MXNet's errors do not say to those who use this package."""

from typing import Callable

from .compat import mx

_NOT_RECORDED = "Cannot differentiate node because it is not in a computational graph"
_CAUSES = (
    "Nothing here was computed from a parameter that has a gradient, within autograd.record(). The usual causes: "
    "training.step and parallel.step have made the backward pass already, so loss.backward() after them is left out; "
    "all parameters are frozen (grad_req='null'); or a second backward pass over one graph, which needs "
    "backward(retain_graph=True)"
)


def is_not_recorded(error: BaseException) -> bool:
    """Whether MXNet's backward pass has found nothing to differentiate."""
    return isinstance(error, mx.base.MXNetError) and _NOT_RECORDED in str(error)


def explain(get_last_error: Callable[[], Exception]) -> Exception:
    """The error of MXNet's last call, with the causes that users of this package meet."""
    error = get_last_error()
    if is_not_recorded(error):
        error.args = (f"{error}\n{_CAUSES}",)
    return error
