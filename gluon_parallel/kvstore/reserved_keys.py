"""Whole-number keys that this package reserves in every store, for what processes count, compare and gather.

MXNet's stores take either whole numbers or names, and gluon.Trainer numbers its parameters from 0; so these begin far
above. A store never compresses what travels under them.
"""

FIRST_RESERVED = (1 << 20) - 4160  # keys from here on are reserved
FIRST_COUNT = (1 << 20) - 64  # from here on keys are never compressed; before it :mod:`.servers` numbers comparisons

STEP_HEADER = (1 << 20) - 1  # reduce.step_header
JOIN = (1 << 20) - 2  # step.sampler
LOSS_PARTS = (1 << 20) - 3  # step.losses
CLOCK = (1 << 20) - 4  # asynchronous.processes
HANDSHAKE_DIGEST = (1 << 20) - 5  # kvstore.handshake
HANDSHAKE_WORDS = (1 << 20) - 6  # kvstore.handshake
ROW_COUNTS = (1 << 20) - 7  # kvstore.process_rows
ROW_FORMS = (1 << 20) - 8  # kvstore.process_rows
OVERFLOW = (1 << 20) - 9  # step.precision
STOP = (1 << 20) - 12  # training.stopping
FIRST_ROWS = (1 << 20) - 56  # kvstore.process_rows, up to 40 sizes
FIRST_EXCHANGE = 1 << 20  # kvstore.state counts from here
