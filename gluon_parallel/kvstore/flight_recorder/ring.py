"""The last exchanges and rendezvous of this process, in memory that compiled code and other processes can reach."""

from __future__ import annotations

import itertools
import os
import re
import struct
import time
from typing import NamedTuple

import numpy as np

from .. import reserved_keys
from . import layout

_KINDS = {"s": "sum", "b": "broadcast", "g": "gather", "u": "push", "d": "pull", "x": "push and pull",
          "p": "sum, parts", "q": "sum, results"}  # fmt: skip  # else agreement
_RESERVED = {value: name.lower().replace("_", " ") for name, value in vars(reserved_keys).items() if name.isupper()}
_NAME = re.compile(r"(\d+)([a-z]):(.*)", re.DOTALL)
_BEGUN = struct.Struct("6q")
_BEGIN, _STEP = layout.PYTHON_RING, layout.ENTRY


class Entry(NamedTuple):
    """One exchange or rendezvous: what, of whom, its number among those of that name, and when."""

    kind: str  # such as "sum"
    key: str
    label: str  # the layer or parameter, where that is known
    call: int  # from 1
    size: int  # bytes
    asked: int  # nanoseconds of the monotonic clock
    done: int  # the same; 0 if it has not ended

    @property
    def what(self):
        """What it is, the same in every process that takes part."""
        return self.kind, self.key, self.label, self.call

    def __str__(self):
        key = f"key {self.key}" if self.key else ""
        return f"{' of '.join(filter(None, [self.kind, self.label or key]))} (call {self.call})"


class Recorder:
    """What this process records; others may read its memory.

    What is named by the same kind, key and label in two processes is the same exchange.
    """

    def __init__(self):
        self.rank, self.size = 0, 1
        self.others: dict = {}  # rank -> memory of that process's recorder, where this one can read it
        self._labels: dict = {}
        self._known: dict = {}  # name -> [its number, how often it was begun]
        self._numbers = itertools.count(1)
        self.where = np.zeros(1, np.int64)  # compiled code is given the address of this word
        self._use(np.zeros(layout.NUM_WORDS, np.int64))
        self.number_of("more than there is place for")

    def _use(self, memory):
        self.memory = memory  # (NUM_WORDS,) int64
        self._words = memoryview(memory)
        self._bytes = self._words.cast("B")
        self.where[0] = memory.ctypes.data

    def move_to(self, memories):
        """Record in ``memories[rank]`` from now on, where others can read it, as this one reads theirs unless None."""
        mine = memories[self.rank]
        self._copy_to(mine)
        mine[layout.PROCESS] = os.getpid()
        self._kept = self.memory  # compiled code may be writing there
        self._use(mine)
        self.others = {rank: memory for rank, memory in enumerate(memories) if rank != self.rank and memory is not None}
        os.register_at_fork(after_in_child=self._leave)

    def _copy_to(self, memory):
        used = layout.NAMES + len(self._known) * layout.NAME_BYTES // 8
        memory[:used] = self.memory[:used]  # the rest stays untouched, and takes no memory

    def _leave(self):
        """In a forked process: record in memory of its own, and read nobody's."""
        memory = np.zeros(layout.NUM_WORDS, np.int64)
        self._copy_to(memory)
        self._use(memory)
        self.others = {}

    def begin(self, name, size, call=None):
        """Record that an exchange of so many bytes begins; returns its number, for :meth:`end`.

        Args:
            name: of an exchange in the progress engine, as bytes; or (kind, key, label).
            call: its number among those of that name, from 1; by default they are counted here.
        """
        known = self._known.get(name) or self._open(name)
        known[1] = known[1] + 1 if call is None else call
        number = next(self._numbers)
        where = 8 * (_BEGIN + number % layout.CAPACITY * _STEP)
        _BEGUN.pack_into(self._bytes, where, number, known[0], known[1], size, time.monotonic_ns(), 0)
        return number

    def end(self, number):
        """Record that it is done, unless so much was recorded since that its entry is gone."""
        where = _BEGIN + number % layout.CAPACITY * _STEP
        if self._words[where] == number:
            self._words[where + layout.DONE] = time.monotonic_ns()

    def number_of(self, kind, key="", label=""):
        """The number by which compiled code names this."""
        return self._open((kind, str(key), label))[0]

    def describe(self, store, key, label):
        """Say which layer or parameter the key of the store of that number belongs to, before it is used."""
        self._labels[str(store), str(key)] = label

    def kind_key_label(self, name):
        """What the name of an exchange in the progress engine says.

        Example:
            >>> Recorder().kind_key_label(b"0s:weight")
            ('sum', 'weight', '')
            >>> Recorder().kind_key_label(b"1b:weight")
            ('broadcast', 'weight of store 1', '')
        """
        if not isinstance(name, bytes):
            return name
        found = _NAME.fullmatch(name.decode())
        if found is None:
            return "agreement", name.decode(), ""
        store, kind, key = found.groups()
        label = self._labels.get((store, key)) or _RESERVED.get(int(key) if key.isdecimal() else key, "")
        if store != "0":  # every store counts its keys from 0
            key = f"{key} of store {store}"
        return _KINDS.get(kind, "agreement"), key, label

    def _open(self, name):
        known = self._known.get(name)
        if known is None:
            number = len(self._known) if len(self._known) < layout.NUM_NAMES else 0
            known = self._known[name] = [number, 0]
            if number or not self.memory[layout.NAMES]:
                text = "\t".join(self.kind_key_label(name)).encode()[: layout.NAME_BYTES - 1]
                begin = 8 * layout.NAMES + number * layout.NAME_BYTES
                self._bytes[begin : begin + len(text)] = text
        return known


def read(memory):
    """The entries of a recorder's memory, the oldest first.

    Example:
        >>> recorder = Recorder()
        >>> recorder.end(recorder.begin(("sum", "0", "conv0_weight"), 256))
        >>> [entry] = read(recorder.memory)
        >>> str(entry), entry.size, entry.done > entry.asked
        ('sum of conv0_weight (call 1)', 256, True)
    """
    words = memory[: layout.NAMES].copy()
    names = memory[layout.NAMES :].view(f"S{layout.NAME_BYTES}")
    entries = []
    for row in words[layout.COMPILED_RING :].reshape(-1, layout.ENTRY).tolist():
        if row[layout.NUMBER] > 0 and row[layout.DONE] != layout.LEFT_TO_PYTHON:
            name = (names[row[layout.NAME]].decode(errors="replace").split("\t", 2) + ["", ""])[:3]  # it may be cut off
            numbers = (row[word] for word in (layout.CALL, layout.SIZE, layout.ASKED, layout.DONE))
            entries.append(Entry(*name, *numbers))
    return sorted(entries, key=lambda entry: entry.asked)


RECORDER = Recorder()  # of this process
