"""State that all users of one store share: keys, compared descriptions, sync groups."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any

from .reserved_keys import FIRST_EXCHANGE


class _State:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.opened: set = set()  # keys
        self.agreed: set[str] = set()  # what all processes send under a key, in words
        self.compares = True  # whether :func:`.handshake.agree` compares anything
        self.new_keys = itertools.count(FIRST_EXCHANGE)  # in the program's order: the same ones in every process
        self.keys: dict[int, int] = {}  # length of a vector -> the key of functions that gather such ones
        self.sync_groups: dict = {}  # kind of sync group -> the store of this process's, see :mod:`.groups`


_lock = threading.Lock()
_states: weakref.WeakKeyDictionary[Any, _State] = weakref.WeakKeyDictionary()


def state_of(store: Any) -> _State:
    """The state of a store, or of the one that a :class:`.Foreign` stands for."""
    with _lock:
        return _states.setdefault(getattr(store, "wrapped", store), _State())


def forget(store: Any) -> None:
    """Number keys, compare and make sync groups anew for other processes; exchanges over this store are built again."""
    with _lock:
        _states.pop(store, None)
