"""Recorder of the last exchanges and rendezvous: names, and the memory that C writes and other processes read."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import operator
import os
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Union

import numpy as np

from ... import native
from ...forks import undo_in_forks
from ...mxnet.engine import Call
from ...native.records import C, address_of
from .. import reserved_keys

_KINDS = {"s": "sum", "b": "broadcast", "g": "gather", "u": "push", "d": "pull", "x": "push and pull", "a": "parts",
          "p": "sum, shards", "q": "sum, results", "o": "object"}  # fmt: skip  # else agreement
_RESERVED = {value: name.lower().replace("_", " ") for name, value in vars(reserved_keys).items() if name.isupper()}
NUM_WORDS = ctypes.sizeof(C.RecorderMemory) // 8
_NAME = re.compile(r"([\d.]+)([a-z]):(.*)", re.DOTALL)
_begin, _end = native.function("gp_recorder_begin", 4, keeps_lock=True), native.function("gp_recorder_end", 3, True)

Name = Union[bytes, tuple[str, str, str]]  # of an exchange in the progress engine; or (kind, key, label)


class Entry(NamedTuple):
    """One exchange or rendezvous: what, of whom, its number among those of that name, and when."""

    kind: str  # such as "sum"
    key: str
    label: str  # the layer or parameter, where that is known
    call: int  # from 1
    size: int  # bytes
    asked: int  # nanoseconds of the monotonic clock
    done: int  # the same; 0 if it has not ended, `C.GAVE_UP` if this process did not wait any longer

    @property
    def what(self) -> tuple[str, str, str, int]:
        """What it is, the same in every process that takes part."""
        return self.kind, self.key, self.label, self.call

    def __str__(self) -> str:
        key = f"key {self.key}" if self.key else ""
        return f"{' of '.join(filter(None, [self.kind, self.label or key]))} (call {self.call})"


class Recorder:
    """What this process records; others may read its memory.

    What is named by the same kind, key and label in two processes is the same exchange.
    """

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        self.progress: Any = None  # the progress engine of this process, which knows what came from the others
        self.others: dict = {}  # rank -> memory of that process's recorder, where this one can read it
        self.members: dict = {}  # number of a store of some of the processes -> their ranks, if this is one of them
        self.stack = 0  # number of the file with the stack of the main thread, see `stack.listen`
        self._labels: dict = {}
        self._kept: Any = None
        self._known: dict = {}  # name -> [its number, how often it was begun]
        self.record = C.Recorder()  # the C library is given its address
        self._use(np.zeros(NUM_WORDS, np.int64))
        self.number_of("more than there is place for")  # number 0: the name of all exchanges when the table is full

    def _use(self, memory: Any) -> None:
        self.memory = memory  # (NUM_WORDS,) int64
        self._record = C.RecorderMemory.from_buffer(memory)
        self.record.memory = address_of(memory)

    def move_to(self, memories: Sequence[Any]) -> None:
        """Record in ``memories[rank]`` from now on, where others can read it, as this one reads theirs unless None."""
        mine = memories[self.rank]
        self._copy_to(mine)
        head = C.RecorderMemory.from_buffer(mine)
        head.process, head.stack = os.getpid(), self.stack
        self._kept = self.memory  # another thread may still write to it; None: not moved yet
        self._use(mine)
        self.others = {rank: memory for rank, memory in enumerate(memories) if rank != self.rank and memory is not None}

    def _copy_to(self, memory: np.ndarray) -> None:
        used = (C.RecorderMemory.names.offset + len(self._known) * C.NAME_BYTES) // 8
        memory[:used] = self.memory[:used]  # the rest stays untouched, and takes no memory

    def leave(self) -> None:
        """In a forked process: record in memory of its own, and read nobody's."""
        if self._kept is not None:
            memory = np.zeros(NUM_WORDS, np.int64)
            self._copy_to(memory)
            self._use(memory)
            self._kept, self.others = None, {}
        self.progress = None

    def begin(self, name: Name, size: int, call: int | None = None) -> int:
        """Record that an exchange of so many bytes begins; returns its number, for :meth:`end`.

        `call` is its number among those of that name, from 1; by default they are counted here.
        """
        known = self._known.get(name) or self._number_name(name)
        known[1] = known[1] + 1 if call is None else call
        return _begin(address_of(self.record), known[0], known[1], size)

    def end(self, number: int, gave_up: bool = False) -> None:
        """Record that it is done, or was given up, unless so much was recorded since that its entry is gone."""
        _end(address_of(self.record), number, C.GAVE_UP if gave_up else 0)

    def number_of(self, kind: str, key: Hashable = "", label: str = "") -> int:
        """The number by which the C library names this."""
        return self._number_name((kind, str(key), label))[0]

    def describe(self, store: int | str, key: Hashable, label: str) -> None:
        """Say which layer or parameter the key of the store of that number belongs to, before it is used."""
        self._labels[str(store), str(key)] = label

    def concerns(self, entry: Entry, rank: int) -> bool:
        """Whether this process and the process `rank` both take part in the exchange."""
        store = entry.key.rpartition(" of store ")[2]
        return rank in self.members.get(store, (rank,))

    def kind_key_label(self, name: Name) -> tuple[str, str, str]:
        """What the name of an exchange in the progress engine says.

        Example:
            >>> Recorder().kind_key_label(b"0s:weight"), Recorder().kind_key_label(b"0.1b:weight")  # a group of store 0
            (('sum', 'weight', ''), ('broadcast', 'weight of store 0.1', ''))
        """
        if not isinstance(name, bytes):
            return name
        found = _NAME.fullmatch(name.decode())
        if found is None:
            return "agreement", name.decode(), ""
        store, kind, key = found.groups()
        label = self._label(store, key)
        if store != "0":  # every store counts its keys from 0
            key = f"{key} of store {store}"
        return _KINDS.get(kind, "agreement"), key, label

    def words_of_key(self, key: Hashable) -> str:
        """For errors: the layer or parameter of a key, or what this package uses the key for.

        Example:
            >>> Recorder().words_of_key(reserved_keys.STEP_HEADER), Recorder().words_of_key(3)
            ('step header', 'key 3')
        """
        return self._label("0", str(key)) or f"key {key}"

    def _label(self, store: str, key: str) -> str:
        return self._labels.get((store, key)) or _RESERVED.get(int(key) if key.isdecimal() else key, "")

    def _number_name(self, name: Name) -> list[int]:
        known = self._known.get(name)
        if known is None:
            number = len(self._known) if len(self._known) < C.NUM_NAMES else 0
            known = self._known[name] = [number, 0]
            if number or not self._record.names[0].value:
                said = "\t".join(self.kind_key_label(name)).encode()
                self._record.names[number].value = said[: C.NAME_BYTES - 1]
        return known


def read(memory: Any) -> list[Entry]:
    """The entries of a recorder's memory, the oldest first.

    Example:
        >>> recorder = Recorder()
        >>> recorder.end(recorder.begin(("sum", "0", "conv0_weight"), 256))
        >>> [entry] = read(recorder.memory)
        >>> str(entry), entry.size, entry.done > entry.asked
        ('sum of conv0_weight (call 1)', 256, True)
    """
    names = C.RecorderMemory.from_buffer(memory).names
    entries = []
    for one in (C.RingEntry * C.CAPACITY).from_buffer_copy(memory, C.RecorderMemory.ring.offset):
        if one.number > 0:
            text = names[one.name].value.decode(errors="replace")  # it may be cut off
            kind, key, label = (text.split("\t", 2) + ["", ""])[:3]
            entries.append(Entry(kind, key, label, one.call, one.size, one.asked, one.done))
    return sorted(entries, key=lambda entry: entry.asked)


RECORDER = Recorder()  # of this process
undo_in_forks(RECORDER.leave)

_files: list = []  # numbers of open files: others open them by these
_records: list = []  # of all exchanges: the engine may have their functions still queued when their store is gone


def move_to_shared_memory(gather: Callable[[str], Sequence[str]]) -> None:
    """Record where other processes of this host can read it from now on, and read theirs; collective.

    The memory has no name in any folder, so nothing of it outlives the processes, however they end. `gather` is a
    function of a short text, which returns the texts of all processes, by rank.
    """
    if RECORDER.others:  # through another store
        gather("")
        return
    mine = ""
    with contextlib.suppress(OSError):  # then each process keeps its record to itself
        file = os.memfd_create("gluon_parallel")
        _files.append(file)
        os.ftruncate(file, 8 * NUM_WORDS)
        mine = f"{os.getpid()} {file} {host()}"
    memories = list(map(_opened, gather(mine)))
    if memories[RECORDER.rank] is not None:
        RECORDER.move_to(memories)


def host() -> str:
    """A text that is equal in processes which can open each other's files; OSError where that is not known."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.geteuid()}"


def _opened(text: str) -> np.ndarray | None:
    """A process's memory, or None if this process cannot read it."""
    with contextlib.suppress(OSError, ValueError):
        process, number, where = text.split(" ", 2)
        if where == host():
            with open(f"/proc/{process}/fd/{number}", "r+b", buffering=0) as opened:
                return np.frombuffer(mmap.mmap(opened.fileno(), 8 * NUM_WORDS), np.int64)
    return None


class StoreRecords:
    """Records of exchanges that run inside a library, which says neither when they begin nor when they are done.

    So a function in MXNet's engine is queued before each, behind the arrays that it will read, and another one after
    it, behind those that it writes. Nobody waits for them. `number` is that of the store.
    """

    def __init__(self, number: int = 0) -> None:
        self._number = number
        self._keys: dict = {}  # kind, key -> number of its name, numbers of its calls, its exchanges

    @contextlib.contextmanager
    def recorded(self, kind: str, key: Hashable, values: Sequence[Any], outs: Sequence[Any]) -> Iterator[None]:
        """Within this block an exchange is queued that begins when `values` are ready, and is done when `outs` are.

        Args:
            kind: a letter of the recorder's names, such as "s" for a sum.
            key: a number or a name.
            values, outs: sequences of the NDArrays that it reads, and of those that it writes.
        """
        if (kind, key) not in self._keys:
            name = RECORDER.kind_key_label(f"{self._number}{kind}:{key}".encode())
            self._keys[kind, key] = RECORDER.number_of(*name), itertools.count(1), []
        name, calls, exchanges = self._keys[kind, key]
        exchange = next((one for one in exchanges if not one.record.busy), None)
        if exchange is None:
            exchange = _ExchangeRecord(name)
            exchanges.append(exchange)
        exchange.begin(values, outs, next(calls))
        try:
            yield
        finally:
            exchange.ended.push()


class _ExchangeRecord:
    """One exchange at a time of one key and kind; there are several if they are under way at once."""

    def __init__(self, name: int) -> None:
        self.record = C.RecordedExchange(recorder=address_of(RECORDER.record), name=name)
        _records.append(self.record)
        self._arrays: list = []  # of the last time

    def begin(self, values: Sequence[Any], outs: Sequence[Any], call: int) -> None:
        """Record call number `call` when `values` are ready."""
        self.record.busy, self.record.call, self.record.record = 1, call, 0
        arrays = [*values, None, *outs]  # None: one that was read may be written this time
        if len(arrays) != len(self._arrays) or not all(map(operator.is_, arrays, self._arrays)):
            where, name = address_of(self.record), "gluon_parallel.flight_recorder"
            self._begun = Call(native.address("gp_recorded_begin"), where, list(values), [], name)
            self.ended = Call(native.address("gp_recorded_end"), where, list(outs), [], name)
            self.record.size = sum(int(np.prod(one.shape)) * np.dtype(one.dtype).itemsize for one in outs[:1])
            self._arrays = arrays
        self._begun.push()
