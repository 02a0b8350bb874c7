"""Functions that every process must call: which one this process is in, for the errors of the exchanges."""

import contextlib
import threading
from collections.abc import Iterator

from ..errors import BarrierTimeout, WorkerLost
from .flight_recorder import CALL, RECORDER

_thread = threading.local()


@contextlib.contextmanager
def collective(name: str) -> Iterator[str]:
    """Within this block, or a function that it decorates, errors name the function `name`, such as "gp.evaluate()".

    Of blocks inside each other the outermost counts, which is what the user has called. Yields its name.

    Example:
        >>> with collective("training.evaluate()"), collective("gp.evaluate()") as name:
        ...     name
        'training.evaluate()'
    """
    if getattr(_thread, "name", None) is not None:
        yield _thread.name
        return
    _thread.name, number = name, RECORDER.begin((CALL, "", name), 0)
    gave_up = False
    try:
        yield name
    except (BarrierTimeout, WorkerLost):
        gave_up = True
        raise
    finally:
        _thread.name = None
        RECORDER.end(number, gave_up)


@contextlib.contextmanager
def outermost() -> Iterator[None]:
    """Within this block, a function has its own name, even if :func:`collective` names another one that has called it.

    After a loss, processes that were in different functions regroup together.
    """
    _thread.name, name = None, getattr(_thread, "name", None)
    try:
        yield
    finally:
        _thread.name = name
