"""Count of a trainer's updates, from which a scheduler's learning rate follows: one for all parameters and devices."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def counted(trainer: Any, parameters: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """In here, the parameters that ``parameters()`` returns take the learning rate of this update, on all devices.

    A scheduler goes by the largest count of a parameter's updates, which MXNet finds one after the other: the first
    device would update parameters that were left out before with the rate of the update before.
    """
    optimizer = trainer.optimizer
    if optimizer.lr_scheduler is None:
        yield
        return
    before = optimizer.num_update
    indices = [trainer._param2idx[parameter.name] for parameter in parameters()]
    counts = optimizer._all_index_update_counts.values()
    after = [count.get(index, optimizer.begin_num_update) + 1 for count in counts for index in indices]
    optimizer.num_update = max([before, *after])
    try:
        yield
    except BaseException:
        optimizer.num_update = before
        raise
