"""Records of a process's flight recorder."""

from __future__ import annotations

import ctypes

from ...engine.compiled.records import Record, several

CAPACITY = 1024  # entries of a ring
LEFT_TO_PYTHON = -1  # in place of `done`: the entry of a rendezvous that goes on in another entry
GAVE_UP = -2  # the same: the others did not come within the limit, or were lost
# On one host a key takes three names (broadcast, agreement, sum), a SyncBatchNorm layer six. The system gives memory to
# those alone that are used. The first name stands for all that find no place.
NUM_NAMES, NAME_BYTES = 16_384, 128


class RingEntry(Record):
    """An exchange or rendezvous, in a line of the cache; times are nanoseconds of the monotonic clock."""

    number: int  # of the ring's entries, from 1; 0 while the entry is written
    name: int  # number of what it is about
    call: int  # how often that was begun, from 1
    size: int  # bytes
    asked: int  # when it began
    done: int  # when it ended; 0 as long as it waits, or one of the two above
    unused: ctypes.Array = several(2)


class Head(Record):
    """The first line of a process's memory."""

    num_begun: int  # entries that compiled code has begun
    process: int  # the number by which the system knows the process
    stack: int  # the number of its open file with the stack of its main thread; 0: it has none
    unused: ctypes.Array = several(5)


class Memory(Record):
    """What a process records, where the other processes of its host can read it."""

    head: ctypes.Array = several(1, Head)
    compiled_ring: ctypes.Array = several(CAPACITY, RingEntry)
    python_ring: ctypes.Array = several(CAPACITY, RingEntry)
    names: ctypes.Array = several(NUM_NAMES, ctypes.c_char * NAME_BYTES)


NUM_WORDS = ctypes.sizeof(Memory) // 8
COMPILED_RING, NAMES = (getattr(Memory, field).offset for field in ("compiled_ring", "names"))  # bytes before them


class Place(Record):
    """Says compiled code where this process records: that changes."""

    memory: int  # address of a Memory


class Exchange(Record):
    """An exchange that runs inside a library."""

    place: int  # address of the Place
    name: int
    call: int
    size: int
    record: int  # number of its entry, once it has begun
    busy: int  # 0 when it has ended
