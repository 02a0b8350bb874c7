"""Shared memory of the processes of one host: its map, allocation, and the exchanges that are under way."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ....errors import ArrayMismatch, StoreUnavailable
from ....mxnet.engine.failures import memory_of
from ....mxnet.engine.functions import one_error_at_a_time
from ....native import function, new_mutex
from ....native.records import C, address_of
from ...flight_recorder import RECORDER
from ...flight_recorder.ring import NUM_WORDS, host
from ..agreement import ProcessGroup, key_of
from ..operations import DTYPES
from ..progress_engine import OF_LEADERS
from ..transport import made_within_limit
from .rows import LINE, TWICE

if TYPE_CHECKING:
    from ..progress_engine import ProgressEngine
    from .sums import SharedSum

_NAP = 0.02  # seconds in which vectors are gathered, as a rule; else the gathering is watched


class SharedMemory:
    """Sums through `memory`, a map of the same file in every process of a host, and over the hosts.

    Args:
        progress: the progress engine, through which processes agree about a key, and by which lost ones are found.
        members: the ranks of the processes of this host, of which the first one speaks for it.
        num_hosts: how many hosts there are.
        group: of the hosts' first processes; None on all others, and if there is one host.
    """

    def __init__(
        self, progress: ProgressEngine, memory: Any, members: list[int], num_hosts: int, group: ProcessGroup | None
    ) -> None:
        self.progress, self.members, self.num_hosts, self.group = progress, members, num_hosts, group
        self._memory = memory  # holds the map
        self.words = np.frombuffer(memory, np.int64)
        self.address = address_of(self.words)
        num = len(members)
        records = num * LINE  # where the flight recorders begin
        self._used = records + num * NUM_WORDS * 8
        if num > 1 and progress.whole is None:
            numbers = [progress.ranks[member] for member in members]
            rows = dict(zip(numbers, self.words[records // 8 : self._used // 8].reshape(num, NUM_WORDS)))
            RECORDER.size = max(RECORDER.size, numbers[-1] + 1)
            RECORDER.move_to([rows.get(rank) for rank in range(RECORDER.size)])
        self._spare: list[tuple[int, int]] = []  # (offset, bytes) of memory that is not used any more, in its order
        # (number of a store, a key, or None for all) that this process uses no more
        self.ended: collections.deque[tuple[int | str, Any]] = collections.deque()
        self._lock = threading.RLock()
        self._rows: dict = {}  # (name, signature) of a key -> its rows
        self._sums: list = []
        self.summed: list[tuple[int, int]] = []  # (address of a key's record, number) of sums that MPI has done
        self.late: set = set()  # gatherings that take longer
        self._arrivals = np.zeros(num, np.int64)
        self._lines = (C.Line * num).from_buffer(memory)
        # An own map takes memory only as it is used; calloc may clear, and so use, all of a large array of zeros.
        self._table = np.frombuffer(mmap.mmap(-1, 8 << 20), np.int64)
        host = self.host = C.Host(size=num, rank=members.index(progress.rank), num_hosts=num_hosts)
        host.lines, host.exchanges = self.address, address_of(self._table)
        self._pushing = new_mutex()
        host.errors, host.pushing = address_of(one_error_at_a_time), address_of(self._pushing)
        host.recorder, host.patience = address_of(RECORDER.record), int(_NAP * 1e9)
        self._thread = threading.Thread(
            target=function("gp_drive", 1), args=(address_of(host),), name="gluon_parallel.shared", daemon=True
        )
        self._thread.start()

    @staticmethod
    def takes(array: Any) -> bool:
        """Whether the C library sums NDArrays like this one."""
        return array.dtype in DTYPES and array.size > 0

    @staticmethod
    def takes_vector(vector: np.ndarray) -> bool:
        """Whether a host's vectors like this one are gathered here: long ones are not."""
        return 0 < vector.nbytes <= TWICE

    def rows_of(self, kind: Callable[..., Any], name: bytes, signature: bytes, shape: Any, dtype: Any) -> Any:
        """The :class:`.Rows` of that kind at a key of the progress engine; made at the first call."""
        with self._lock:
            if (name, signature) not in self._rows:
                self._rows[name, signature] = kind(self, name, signature, shape, np.dtype(dtype))
            return self._rows[name, signature]

    def allocate(self, size: int) -> int:
        """The offset of so many bytes; all processes do so in the same order."""
        size += -size % LINE
        with self._lock:
            index = next((index for index, (_, room) in enumerate(self._spare) if room >= size), None)
            if index is not None:
                begin, room = self._spare[index]
                self._spare[index : index + 1] = [(begin + size, room - size)] * (room > size)
                return begin
            begin = self._used
            self._used += size
        if self._used > len(self._memory):
            raise StoreUnavailable(f"store 'mpi': {self._used} bytes of shared memory are more than this host has")
        return begin

    def free(self, begin: int, size: int) -> None:
        """Use memory that was allocated for something else; all processes do so in the same order."""
        with self._lock:
            merged: list[tuple[int, int]] = []
            for offset, room in sorted([*self._spare, (begin, size + -size % LINE)]):
                if merged and sum(merged[-1]) == offset:
                    offset, room = merged[-1][0], merged.pop()[1] + room
                merged.append((offset, room))
            self._spare = merged

    def announce_ended(self) -> None:
        """Tell the others which rows this process uses no more, when nothing is under way there; MPI is locked."""
        for _ in range(len(self.ended)):
            number, key = self.ended.popleft()
            with self._lock:
                rows = [one for (name, _), one in self._rows.items() if _is_of(name, number, key)]
                keys = set(map(id, rows))
                exchanges = [one for one in self._sums if id(one.key) in keys]
            if any(exchange.record.state for exchange in exchanges):
                self.ended.append((number, key))
            elif any(one.record.next_number for one in rows):
                self.progress.everyone.announce(_Release(self, number, key))

    def take_rows(self, number: int | str, key: Any) -> list[Any]:
        """The rows of a key, or of all keys of a store, in the order of their memory; they are known here no more."""
        with self._lock:
            found = [
                what for what, one in self._rows.items() if _is_of(what[0], number, key) and one.record.next_number
            ]
            rows = sorted(map(self._rows.pop, found), key=lambda one: one.record.lines)
            keys = set(map(id, rows))
            for exchange in self._sums:
                if id(exchange.key) in keys:
                    exchange.forget()
        return rows

    def enter(self, exchange: SharedSum) -> None:
        """Make a new exchange known to the driver."""
        with self._lock:
            if len(self._sums) == len(self._table):
                raise StoreUnavailable(
                    f"store 'mpi': this process has made {len(self._sums)} exchanges, one per key and plan of a step, "
                    "which it keeps to its end. Make nets and trainers once, or start a new process"
                )
            self._table[len(self._sums)] = address_of(exchange.record)
            self._sums.append(exchange)
            self.host.num_exchanges = len(self._sums)

    def look(self) -> None:
        """Move everything that can be moved."""
        _look(address_of(self.host))

    def tell_summed(self) -> None:
        """Have the processes of this host read what MPI has summed over the hosts."""
        if self.summed:
            done, self.summed = np.array(self.summed).T.copy(), []
            _summed(address_of(self.host), address_of(done[0]), address_of(done[1]), done.shape[1])

    def pending(self) -> bool:
        """Whether anything is under way."""
        return bool(self.late) or any(exchange.record.state for exchange in self._sums)

    def heard(self) -> list[int]:
        """The ranks from which something has come since the last call."""
        arrivals = np.array([line.num_arrivals for line in self._lines])
        indices = np.flatnonzero(arrivals != self._arrivals).tolist()
        self._arrivals = arrivals
        return [self.members[index] for index in indices]

    def waiting(self) -> list[Any]:
        """The exchanges that wait for other processes.

        Raises:
            ArrayMismatch: one cannot be done.
        """
        found, now = list(self.late), time.monotonic()
        for exchange in self._sums:
            state, number = exchange.record.state, exchange.record.number
            if state in (C.AWAITING_ROW, C.WAITING, C.SUMMING):
                if exchange.record.problem:
                    raise ArrayMismatch(
                        f"store 'mpi', key {key_of(exchange.name)}: an operator has left the array in oneDNN's "
                        "own layout since the last exchange. Let it write to an array of its own, not to out=, or hand "
                        "over a copy"
                    )
                if exchange.seen != number:
                    exchange.seen, exchange.since = number, now
                found.append(exchange)
        return found

    def abandon(self, error: Exception) -> None:
        """End everything that is under way, now and from now on: who reads its arrays gets `error`."""
        pending = [exchange for exchange in self._sums if exchange.record.state]
        for exchange in pending:
            exchange.fail(error)  # before it ends, so that nobody reads its arrays in between
        self.disown(error)
        self.look()

    def disown(self, error: Exception) -> None:
        """Have every exchange that is pushed from now on end with `error`."""
        self._failed = memory_of(error)  # the C library hands it to the engine later, too
        self.host.failed = ctypes.addressof(self._failed)

    def close(self) -> None:
        """End the driver."""
        self.host.stopped = 1
        _wake(address_of(self.host))
        self._thread.join()


def _is_of(name: bytes, number: int | str, key: Any) -> bool:
    """Whether the rows of that name are a key's gathering in the store of that number; key None: any of the store's."""
    store, _, rest = name.decode().partition(":")
    return store[:-1] == str(number) if key is None else (store, rest) == (f"{number}g", str(key))


class _Release:
    """Agreement that no process uses certain rows any more; then, that they are free, all zero as new memory is.

    The first process of each host clears them when all have announced that nothing is under way there.
    """

    takes_any_time = True  # a process may hold its store for longer

    def __init__(self, shared: SharedMemory, number: int | str, key: Any) -> None:
        self._shared, self._number, self._key = shared, number, key
        self.name, self.signature = f"{number}-: end of {'all' if key is None else key}".encode(), b"is used no more"
        self._rows: list[Any] | None = None

    def agreed(self) -> None:
        shared = self._shared
        if self._rows is None:
            self._rows = shared.take_rows(self._number, self._key)
            for rows in self._rows if shared.host.rank == 0 else ():
                ctypes.memset(rows.record.lines, 0, rows.num_bytes)
            self.signature = b"is cleared"
            shared.progress.everyone.announce(self)
        else:
            for rows in self._rows:
                shared.free(rows.record.lines - shared.address, rows.num_bytes)


_look, _wake, _summed = function("gp_look", 1), function("gp_wake", 1), function("gp_summed", 4)


SWITCH = "GLUON_PARALLEL_SHARED_MEMORY"  # 0: every process is a host of its own


def map_memory(progress: ProgressEngine) -> SharedMemory | None:
    """Memory in which the C library sums for the processes of one host, or None if not all can have it; collective.

    One process alone has it too, since this is faster than MPI's operations.
    Processes share memory that run on one host, as one user, and see each other's processes. The memory has no name in
    any folder, so nothing of it outlives the processes, however they end.
    """
    # The naive engine knows no function that ends later.
    usable = os.environ.get("MXNET_ENGINE_TYPE") != "NaiveEngine"
    digest = np.frombuffer(hashlib.sha256(_host(progress.rank).encode()).digest(), np.int64)
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of addresses; memory it takes as it is used
    with contextlib.ExitStack() as closing:
        file, memory = -1, None
        with contextlib.suppress(OSError):
            file = os.memfd_create("gluon_parallel")
            closing.callback(os.close, file)
            os.ftruncate(file, size)
        rows = progress.gather(b"hosts:name", b"", np.array([usable, os.getpid(), file, size, *digest]))
        if not rows[:, 0].all():
            return None
        # By host: its number is that of its first process, which speaks for it and whose file all use.
        names = [row.tobytes() for row in rows[:, 4:]]
        first = np.array([names.index(name) for name in names])
        _, process, file, size = rows[first[progress.rank], :4].tolist()
        with contextlib.suppress(OSError, ValueError):
            with open(f"/proc/{process}/fd/{file}", "r+b", buffering=0) as opened:
                memory = mmap.mmap(opened.fileno(), size)
        opened_by = progress.gather(b"hosts:opened", b"", np.array([memory is not None]))[:, 0]
    for rank in range(progress.size):  # where one process of a host cannot open it, each is a host of its own
        if not opened_by[first == first[rank]].all():
            names[rank] = f"process {rank}".encode()
    first = np.array([names.index(name) for name in names])
    leaders, members = np.unique(first).tolist(), np.flatnonzero(first == first[progress.rank]).tolist()
    if len(members) == 1:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_NORESERVE", 0))
    group = None
    if len(leaders) > 1:  # by Split, since Create_group waits for ever for a process that is lost meanwhile
        color = 0 if progress.rank in leaders else progress.mpi.UNDEFINED
        comm = made_within_limit(progress, lambda: progress.comm.Split(color, progress.rank))
    if len(leaders) > 1 and progress.rank in leaders:
        group = ProcessGroup(progress, comm, leaders, OF_LEADERS)
        progress.groups.update(dict.fromkeys(OF_LEADERS, group))
    return SharedMemory(progress, memory, members, len(leaders), group)


def _host(rank: int) -> str:
    """What must be equal for processes to share memory; where they must not, unlike any other's."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"process {rank}"
    try:
        return host()
    except OSError:
        return f"the host of process {rank}"
