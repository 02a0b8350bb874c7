"""The processes of one host sum through shared memory: who has which row, and what is still waited for."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import mmap
import operator
import os
import platform
import sys
import threading
import time
from typing import Any

import numpy as np

from ..compat import mx
from ..engine import Call, fail
from ..errors import ArrayMismatch, StoreUnavailable
from ..failures import address
from .exchanges import Gather
from .pthread import address_of, locked, new_mutex

SWITCH = "GLUON_PARALLEL_SHARED_MEMORY"  # 0: everything goes by messages
_LINE = 64  # bytes that no two processes write to
_TWICE = 64 * 1024  # bytes up to which a key has two rows per process, so that nobody waits for a slow reader
# The number of the system call by which threads and processes sleep on a word; 0 where there is none.
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
_NAP = 0.02  # seconds in which a meeting is over, as a rule; else it is watched


def share(hub):
    """Shared memory for the processes of `hub`, or None if they cannot have it; collective.

    They can if all run on one host, as one user, and see each other's processes. The memory has no name in any
    folder, so nothing of it outlives the processes, however they end.
    """
    if hub.size == 1:
        return None
    place = hashlib.sha256(_place(hub.rank).encode()).digest()
    rows = _tell(hub, "place", np.frombuffer(place, np.uint8))
    if any((row != rows[0]).any() for row in rows):
        return None
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # of addresses; memory it takes as it is used
    memory, file = None, -1
    try:
        if hub.rank == 0:
            file = os.memfd_create("gluon_parallel")
            os.ftruncate(file, size)
    except OSError:
        file = -1
    found = _tell(hub, "memory", np.array([os.getpid(), file, size]))[0]
    if file < 0 and hub.rank == 0 or found[1] < 0:
        return None
    try:
        with open(f"/proc/{found[0]}/fd/{found[1]}", "r+b", buffering=0) as opened:
            memory = mmap.mmap(opened.fileno(), int(found[2]))
    except (OSError, ValueError):
        memory = None
    everyone = _tell(hub, "opened", np.array([memory is not None]))
    if file >= 0:
        os.close(file)
    return Shared(hub, memory) if memory is not None and all(row.all() for row in everyone) else None


def _place(rank):
    """What must be equal for processes to share memory; where it cannot be used, unlike any other's."""
    naive = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"  # it knows no function that ends later
    if naive or not FUTEX or os.environ.get(SWITCH, "1") == "0":
        return f"process {rank}"
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.geteuid()}"
    except OSError:
        return f"the host of process {rank}"


def _tell(hub, name, vector):
    """Everybody's vector, by rank."""
    exchange = Gather(f"shared:{name}".encode(), b"", lambda error: None, vector)
    hub.wait(exchange)
    return [row.view(vector.dtype) for row in exchange.rows]


class Shared:
    """Sums through `memory`, a map of the same file in every process of `hub`.

    Args:
        hub: what the processes need to agree about a key goes through it, and whoever is lost is found by it.
    """

    def __init__(self, hub, memory):
        from . import compiled  # here: half a second for Numba, which only those pay who share

        self._code = compiled
        self._hub = hub
        self._memory = memory  # holds the map
        self.words = np.frombuffer(memory, np.int64)
        self._address = self.words.ctypes.data
        self._used = hub.size * _LINE
        self._lock = threading.RLock()
        self._keys: dict = {}  # (store's number, key) -> Key
        self._records: list = []
        self._meetings: set = set()  # those that take longer
        self._beats = np.zeros(hub.size, np.int64)
        group = self._group = np.zeros(compiled.NUM_GROUP_WORDS, np.int64)
        self._table = np.zeros(1 << 10, np.int64)
        c_library, library = ctypes.CDLL(None), mx.base._LIB
        group[compiled.SIZE], group[compiled.RANK] = hub.size, hub.rank
        group[compiled.LINES], group[compiled.EXCHANGES] = self._address, self._table.ctypes.data
        group[compiled.FUTEX] = FUTEX
        group[compiled.SECONDS], group[compiled.NANOSECONDS] = 0, int(_NAP * 1e9)
        for word, function in (
            (compiled.SYSCALL, c_library.syscall),
            (compiled.TO_DLPACK, library.MXNDArrayToDLPack),
            (compiled.FREE_DLPACK, library.MXNDArrayCallDLPackDeleter),
        ):
            group[word] = ctypes.cast(function, ctypes.c_void_p).value or 0
        self._driver = threading.Thread(
            target=compiled.drive, args=(group.ctypes.data,), name="gluon_parallel.shared", daemon=True
        )
        self._driver.start()

    def key(self, names, array):
        """The key's place in the memory; None if its sums have to go by messages.

        Args:
            names: of the key, as the hub knows them: for what is agreed about it, and for its messages of any kind.
            array: one of its NDArrays.
        """
        if np.dtype(array.dtype).name not in self._code.DTYPES or array.size == 0:
            return None
        return self._place(Key, names, array)

    def meeting(self, names, vector):
        """The same for meetings at which every process hands in a vector like this, and gets all of them."""
        return self._place(Meeting, names, vector) if 0 < vector.nbytes <= _TWICE else None

    def _place(self, kind, names, array):
        dtype = np.dtype(array.dtype).name
        known = self._keys.get(names)
        if known is None:
            with self._lock:
                known = self._keys.get(names)
                if known is None:
                    known = self._keys[names] = kind(self, names, array.shape, dtype)
        return known if (known.shape, known.dtype) == (array.shape, dtype) else None

    def allocate(self, size):
        """The offset of so many bytes; process 0 alone does so."""
        with self._lock:
            begin = self._used
            self._used += size + -size % _LINE
        if self._used > len(self._memory):
            raise StoreUnavailable(f"store 'mpi': {self._used} bytes of shared memory are more than this host has")
        return begin

    def enter(self, record):
        """Make a new record known to the driver."""
        with self._lock:
            number = len(self._records)
            if number == len(self._table):
                table = np.concatenate([self._table, np.zeros_like(self._table)])
                self._kept = [self._table, *getattr(self, "_kept", ())]  # the driver may be reading it
                self._table = table
                self._group[self._code.EXCHANGES] = table.ctypes.data
            self._records.append(record)
            self._table[number] = record.words.ctypes.data
            self._group[self._code.NUM_EXCHANGES] = number + 1

    def look(self):
        """Move everything that can be moved."""
        self._code.look(self._group.ctypes.data)

    def pending(self):
        """Whether anything is under way."""
        return bool(self._meetings) or any(record.words[self._code.STATE] for record in self._records)

    def heard(self):
        """The ranks from which something has come since the last call."""
        beats = self.words[self._code.BEAT : self._hub.size * _LINE // 8 : _LINE // 8].copy()
        ranks = np.flatnonzero(beats != self._beats).tolist()
        self._beats = beats
        return ranks

    def waiting(self):
        """The exchanges that wait for other processes.

        Raises:
            ArrayMismatch: one cannot be done.
        """
        code, found, now = self._code, list(self._meetings), time.monotonic()
        for record in self._records:
            state, number = record.words[code.STATE], record.words[code.NUMBER]
            if state in (code.HOLDING, code.WAITING):
                if record.words[code.PROBLEM]:
                    raise ArrayMismatch(
                        f"store 'mpi', {record.title}: an operator has left the array in oneDNN's own layout since "
                        "the last exchange. Let it write to an array of its own, not to out=, or hand over a copy"
                    )
                if record.seen != number:
                    record.seen, record.since = number, now
                found.append(record)
        return found

    def abandon(self, error):
        """End everything that is under way, now and from now on: who reads its arrays gets `error`."""
        pending = [record for record in self._records if record.words[self._code.STATE]]
        for record in pending:
            record.fail(error)  # before it ends, so that nobody reads its arrays in between
        self._group[self._code.FAILED] = address(error)
        self.look()

    def close(self):
        """End the driver."""
        self._group[self._code.STOPPED] = 1
        self._code.ring(self._group.ctypes.data, self._hub.rank)
        self._driver.join()


class _Rows:
    """One key's rows in the shared memory, once all processes have agreed where they are."""

    def __init__(self, shared, names, shape, dtype):
        self.shared, self.names, self.shape, self.dtype = shared, names, shape, dtype
        self.form = f"{dtype} {tuple(shape)}".encode()
        code, hub = shared._code, shared._hub
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._row = size + -size % _LINE
        self.depth = 2 if size <= _TWICE else 1
        words = self.words = np.zeros(code.ROWS + self.depth * hub.size, np.int64)
        words[code.NUM_VALUES], words[code.DEPTH] = np.prod(shape), self.depth
        self.lines = 0  # where the processes' lines begin, in words
        offset = shared.allocate(hub.size * (_LINE + self.depth * self._row)) if hub.rank == 0 else 0
        self._agreement = Gather(names[0], self.form, self._agreed, np.array([offset]))

    def ranks_missing(self, which, number):
        """The ranks whose word `which` is not at `number` yet."""
        end = self.lines + self.shared._hub.size * _LINE // 8
        return set(np.flatnonzero(self.shared.words[self.lines + which : end : _LINE // 8] < number).tolist())

    def _agreed(self, error):
        if error is not None:
            return  # the hub has failed, and ends all that wait
        shared, code = self.shared, self.shared._code
        offset = int(self._agreement.rows[0].view(np.int64)[0])
        rows = shared._address + offset + shared._hub.size * _LINE
        for row in range(self.depth * shared._hub.size):
            self.words[code.ROWS + row] = rows + row * self._row
        self.lines = offset // 8
        self.words[code.KEY_LINES] = shared._address + offset
        self.words[code.TURN] = 1
        shared.look()


class Key(_Rows):
    """Sums at one key."""

    def __init__(self, shared, names, shape, dtype):
        super().__init__(shared, names, shape, dtype)
        self._records: list = []
        self._number = 0
        self._lock = threading.Lock()
        self.words[shared._code.DTYPE] = shared._code.DTYPES.index(dtype)
        shared._hub.submit(self._agreement)

    def push(self, values, outs, priority):
        """The arrays `outs` become the sum of all processes' `values`, when those are ready; returns at once.

        Args:
            values, outs: NDArrays of this process's CPU devices, in the plain layout.
        """
        with self._lock:
            for record in self._records:
                if record.fits(values, outs):
                    break
            else:
                record = Record(self, len(values), len(outs))
                self._records.append(record)
            record.take(values, outs)
            self._push(record, priority)

    def push_again(self, values, outs, priority):
        """The same if these are the arrays of an earlier time, which need no second look; whether it was done."""
        self.shared._hub.check()
        with self._lock:
            for record in self._records:
                if record.holds(values, outs):
                    self._push(record, priority)
                    return True
        return False

    def _push(self, record, priority):
        self._number += 1
        try:
            record.push(self._number, priority)
        except BaseException:
            self._number -= 1
            raise
        hub = self.shared._hub
        if hub.failure is not None:  # since the caller looked
            record.fail(hub.failure)
        hub.watch()


class Record:
    """One exchange at a time of one key, over so many arrays."""

    def __init__(self, key, num_read, num_written):
        code = key.shared._code
        self.name, self.form = key.names[0], key.form
        self.title = f"key {self.name.decode().partition(':')[2]}"
        self.elsewhere = key.names  # what the hub calls this key where it does not go through shared memory
        self.seen, self.since = 0, 0.0  # which number is waited for, since when
        self._key, self._code = key, code
        self._num_read, self._num_written = num_read, num_written
        self._arrays: list = []
        self._call: Any = None
        words = self.words = np.zeros(code.HANDLES + 2 * (num_read + num_written), np.int64)
        words[code.GROUP], words[code.KEY] = key.shared._group.ctypes.data, key.words.ctypes.data
        words[code.NUM_READ], words[code.NUM_WRITTEN] = num_read, num_written
        key.shared.enter(self)

    def fits(self, values, outs):
        """Whether nothing is under way, and the arrays are as many."""
        idle = self.words[self._code.STATE] == self._code.IDLE
        return idle and len(values) == self._num_read and len(outs) == self._num_written

    def holds(self, values, outs):
        """Whether nothing is under way, and these are the arrays of the last time."""
        return self.fits(values, outs) and all(map(operator.is_, itertools.chain(values, outs), self._arrays))

    def take(self, values, outs):
        """Use these arrays from now on."""
        self._arrays = [*values, *outs]
        for number, array in enumerate(self._arrays):
            self.words[self._code.HANDLES + number] = array.handle.value
        address = self.words.ctypes.data
        self._call = Call(self._code.begin.address, address, values, outs, f"gluon_parallel.mpi {self.title}")

    def push(self, number, priority):
        """Hand the exchange of this number to the engine."""
        self.words[self._code.NUMBER] = number
        self.words[self._code.STATE] = self._code.PUSHED
        try:
            self._call.push(priority)
        except BaseException:
            self.words[self._code.STATE] = self._code.IDLE
            raise

    def fail(self, error):
        """Each array that was to be written raises `error`: the engine forgets as soon as one of them is read."""
        fail(self._arrays[self._num_read + 1 :], error)

    def ranks_missing(self):
        """From whom something is still to come."""
        code, number = self._code, self.seen
        if self.words[code.STATE] == code.HOLDING:
            return self._key.ranks_missing(code.LEFT, number - self._key.depth)
        return self._key.ranks_missing(code.ARRIVED, number)


class Meeting(_Rows):
    """Everyone hands in a vector and gets all of them, one meeting at a time; the thread that calls waits."""

    def __init__(self, shared, names, shape, dtype):
        super().__init__(shared, names, shape, dtype)
        self.name, self.elsewhere = names[0], names
        self.title = f"key {self.name.decode().partition(':')[2]}"
        self.since = 0.0
        self.words[shared._code.NUM_VALUES] *= np.dtype(dtype).itemsize  # bytes
        self._mutex = new_mutex()  # compiled code holds it too
        self.num_processes = shared._hub.size
        self.addresses = tuple(map(address_of, (self._mutex, shared._group, self.words)))  # see compiled.gather

    def gather(self, vector, has_begun=False):
        """Everybody's `vector`, by rank; `has_begun`: compiled code has handed it in at its last turn."""
        shared, code = self.shared, self.shared._code
        out = np.empty((self.num_processes, *self.shape), self.dtype)
        with locked(self._mutex):
            if self.words[code.TURN] == 0:  # here, not before: others may have to meet elsewhere before they come
                shared._hub.wait(self._agreement)
            shared._hub.check()
            self.words[code.TURN] += not has_begun
            where = shared._group.ctypes.data, self.words.ctypes.data, self._number
            if not code.gather(*where, 0 if has_begun else vector.ctypes.data, out.ctypes.data):
                self.since = time.monotonic()
                shared._meetings.add(self)
                try:
                    shared._hub.watch()
                    while not code.gather(*where, 0, out.ctypes.data):
                        shared._hub.check()
                finally:
                    shared._meetings.discard(self)
        return out

    def ranks_missing(self, *_):
        """From whom something is still to come."""
        return super().ranks_missing(self.shared._code.ARRIVED, self._number)

    @property
    def _number(self):
        """Of the meeting that is under way, or was the last; they are counted from 1."""
        return int(self.words[self.shared._code.TURN]) - 1
