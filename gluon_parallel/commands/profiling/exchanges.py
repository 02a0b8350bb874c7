"""Exchanges between processes: when each process was ready for one, when the last one was, and when it had ended."""

import collections
import re
from typing import NamedTuple

from ...kvstore.reserved_keys import FIRST_RESERVED

_OURS = re.compile(r"gluon_parallel\.mpi (?:key )?(.+)")
_OTHERS = re.compile(r"KVStoreDist|horovod|Horovod")  # which do not say the key


class KeyExchange(NamedTuple):
    """One exchange, as one process sees it; nanoseconds."""

    what: str  # key of the store, or layer and direction
    is_operator: bool  # of the engine, not of a layer
    ready: int  # this process
    all_ready: int
    end: int
    is_gradient: bool
    last_rank: int = -1  # the process that was ready last; -1 where that is not known


def is_exchange(name):
    """Whether that operator exchanges with other processes."""
    return bool(_OURS.match(name) or _OTHERS.match(name))


def of_processes(recordings):
    """The exchanges of each process, a list of :class:`KeyExchange` per recording.

    The n-th exchange of a key is the same one in every process, because recording begins at the same step.
    """
    if len(recordings) == 1 and not any(_OTHERS.match(one.name) for one in recordings[0].operators):
        return [[]]
    all_found = [list(_found(one)) for one in recordings]
    came: dict = collections.defaultdict(dict)  # what, number -> when each process was ready: its last device
    for recording, found in zip(recordings, all_found):
        for key, exchange in found:
            came[key][recording.rank] = max(exchange.ready, came[key].get(recording.rank, 0))

    def known(key, exchange):
        if len(came[key]) < len(recordings):
            return exchange
        last = max(came[key], key=came[key].__getitem__)
        return exchange._replace(all_ready=min(came[key][last], exchange.end), last_rank=last)

    return [[known(*pair) for pair in found] for found in all_found]


def _found(recording):
    """Pairs of what identifies an exchange in all processes, and the exchange."""
    numbers: collections.Counter = collections.Counter()
    for operator in recording.operators:
        name, begin, end = operator.name, operator.begin, operator.end
        ours = _OURS.match(name)
        if ours:
            numbers[name] += 1
            key = ours.group(1)
            is_gradient = not key.isdigit() or int(key) < FIRST_RESERVED
            yield (name, numbers[name]), KeyExchange(f"key {key}", True, begin, begin, end, is_gradient)
        elif _OTHERS.match(name):  # nobody can tell which one it is in other processes
            yield (recording.rank, id(operator)), KeyExchange(name, True, begin, begin, end, True)
    for one in recording.passes:
        if one.complete < one.reduced:
            what = f"{one.layer}, {one.direction}"
            yield (what, one.call), KeyExchange(what, False, one.complete, one.complete, one.reduced, False)
