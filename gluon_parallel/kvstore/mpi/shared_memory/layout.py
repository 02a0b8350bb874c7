"""Layout of the shared memory and of the driver's records: which 64-bit word is what."""

import platform
import sys

# The number of the system call by which threads and processes sleep on a word; 0 where there is none.
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0) if sys.platform == "linux" else 0

LINE = 64  # bytes; no two processes write to one line of the cache

# Shared, a line per process at the beginning of the memory.
BELL, SLEEPS, BEAT = range(3)  # counted up to wake its driver; whether that sleeps; how often the process has arrived
# Shared, a line per process before the rows of each key; numbers of exchanges.
ARRIVED, LEFT, HELD = range(3)  # its row is written; it has read all rows; it waits for the others to have read theirs
KEY_BELL, KEY_SLEEPS = 3, 4  # as above, for a thread that waits for this key alone

# Of this process, once. FAILED is 0, or the address of the engine's exception with which all exchanges end.
SIZE, RANK, LINES, FAILED, STOPPED, NUM_EXCHANGES, EXCHANGES = range(7)
SECONDS, NANOSECONDS, RECORDER, NUM_GROUP_WORDS = range(7, 11)
# Of this process, per key; the addresses of its rows follow. TURN is the exchange to come next, 0 before all agreed.
# KEY_NAME is the flight recorder's number of the key, KEY_RECORD its number of what is under way.
KEY_LINES, NUM_VALUES, DTYPE, DEPTH, TURN, NUM_QUEUED, KEY_NAME, KEY_RECORD, ROWS = range(9)
# Of this process, per exchange; the handles of its arrays follow, and then their addresses.
STATE, GROUP, KEY, NUMBER, NUM_READ, NUM_WRITTEN, DONE, ENGINE, PARAMETER, PROBLEM, RECORD, HANDLES = range(12)

# An exchange is not under way; handed to the engine; before its turn; before its row is free; before all have arrived;
# in the hands of one thread.
IDLE, PUSHED, QUEUED, HOLDING, WAITING, BUSY = range(6)

DTYPES = ("float32", "float64", "int32")
