"""Records of the shared memory of a host, and of what this process's driver knows."""

from __future__ import annotations

import ctypes
import platform
import sys

from ....engine.compiled.records import Record

# The number of the system call by which threads and processes sleep on a word; 0 where there is none.
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0
DTYPES = ("float32", "float64", "int32")
WORTH = 64 * 1024  # bytes from which on memory that is not needed is given back


class Line(Record):
    """What one process tells those of its host: a line of the cache, to which no other process writes but the bell.

    It has one at the beginning of the memory, and one before the rows of each key. An exchange is known by its number.
    """

    bell: int  # counted up to wake the process's driver; at a key, a thread that waits for this key alone
    sleeps: int  # whether that sleeps
    beat: int  # how often the process has arrived, at all keys
    arrived: int  # at a key: its row is written
    left: int  # it has read all rows
    held: int  # it waits for the others to have read theirs
    summed: int  # of the first process: the sum over the hosts is there
    unused: int


LINE = ctypes.sizeof(Line)


class Group(Record):
    """The processes of this host, as this one sees them."""

    size: int
    rank: int
    lines: int  # address of a Line of each process
    failed: int  # 0, or the address of the engine's exception with which all exchanges end
    errors: int  # address of the mutex `one_error_at_a_time`
    stopped: int
    num_exchanges: int
    exchanges: int  # address of the addresses of all Exchanges
    seconds: int  # with `nanoseconds`, a time: how long a thread waits in `compiled_gather`
    nanoseconds: int
    recorder: int  # address of the flight recorder's Place
    num_hosts: int
    start: int  # address of the function that starts MPI's operation, on the process that speaks for the host


class Key(Record):
    """A key, as this process sees it."""

    lines: int  # address of a Line of each process
    num_values: int  # of a row; for gathering, bytes
    dtype: int  # number in DTYPES
    depth: int  # how many rows a process has
    turn: int  # number of the exchange to come next; 0 before all processes have agreed
    num_queued: int
    name: int  # the flight recorder's number of the key
    record: int  # and of what is under way
    result: int  # address of the sum over the hosts
    number: int  # for Group.start
    rows: int  # address of the addresses of the rows, (depth, processes)


class Segment(Record):
    """One of the arrays that travel together, or a range of one's values."""

    num_values: int  # of the whole array
    offset: int  # bytes from the beginning of a row to where the array's first value would be
    result: int  # address of its sum over the hosts
    bounds: int  # address of (processes + 1) numbers: which of its values each process owns; 0: it is summed whole


class Exchange(Record):
    """One exchange at a time of one key."""

    state: int
    group: int  # addresses
    key: int
    number: int
    num_read: int
    num_written: int
    num_bytes: int  # of a row
    num_segments: int
    segments: int  # address of the Segments
    gathers: int  # of values with owners: whether all get the owner's, or the owner the sum
    releases: int  # whether the pages of values of other owners are given back once they are sent
    callback: int  # the engine's `OnComplete`
    engine: int
    param: int
    problem: int  # whether one of its arrays is in oneDNN's layout
    record: int  # the flight recorder's number
    handles: int  # address of MXNet's handles of its arrays, those that it reads first
    arrays: int  # address of the addresses of their values


# An exchange is not under way; handed to the engine; before its turn; before its row is free; before all have arrived;
# before MPI has summed over the hosts; in the hands of one thread.
IDLE, PUSHED, QUEUED, HOLDING, WAITING, SUMMING, BUSY = range(7)
