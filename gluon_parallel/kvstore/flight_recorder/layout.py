"""Layout of a process's flight recorder: which 64-bit word is what."""

CAPACITY = 1024  # entries of a ring
ENTRY = 8  # words of an entry: a line of the cache
# Of an entry. NUMBER counts a ring's entries from 1; NAME is the number of what the entry says it is about; CALL counts
# from 1 how often that was begun; ASKED and DONE are nanoseconds of the monotonic clock, DONE 0 as long as it waits.
NUMBER, NAME, CALL, SIZE, ASKED, DONE = range(6)
LEFT_TO_PYTHON = -1  # in place of DONE: the entry of a rendezvous that goes on in another entry

HEAD, PROCESS = 0, 1  # how many entries compiled code has begun; the number by which the system knows the process
COMPILED_RING = ENTRY  # where its ring begins; what Python records goes to one of its own
PYTHON_RING = COMPILED_RING + CAPACITY * ENTRY
NAMES = PYTHON_RING + CAPACITY * ENTRY
# On one host a key takes three names (broadcast, agreement, sum), a SyncBatchNorm layer six. The system gives memory to
# those alone that are used. The first name stands for all that find no place.
NUM_NAMES, NAME_BYTES = 16_384, 128
NUM_WORDS = NAMES + NUM_NAMES * NAME_BYTES // 8

# Of an exchange that runs inside a library. WHERE is the address of the word that says where the recorder is; RECORD is
# the number of its entry, once it has begun; BUSY is 0 when it has ended.
WHERE, EXCHANGE_NAME, EXCHANGE_CALL, EXCHANGE_SIZE, RECORD, BUSY = range(6)
EXCHANGE_WORDS = 6
