"""Rows of one key in shared memory: one or two per process, at places on which all processes agree."""

import numpy as np

from ...flight_recorder import RECORDER
from ..collectives import Gather
from .layout import DEPTH, KEY_LINES, KEY_NAME, LINE, NUM_VALUES, ROWS, TURN

TWICE = 64 * 1024  # bytes up to which a key has two rows per process, so that nobody waits for a slow reader


class Rows:
    """One key's rows in the shared memory, once all processes have agreed where they are."""

    kind: str  # in the flight recorder

    def __init__(self, shared, names, shape, dtype):
        self.shared, self.name, self.elsewhere = shared, names[0], names
        self.shape, self.dtype = shape, dtype
        self.form = f"{dtype} {tuple(shape)}".encode()
        progress = shared.progress
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._row = size + -size % LINE
        self.depth = 2 if size <= TWICE else 1
        words = self.words = np.zeros(ROWS + self.depth * progress.size, np.int64)
        words[NUM_VALUES], words[DEPTH] = np.prod(shape), self.depth
        words[KEY_NAME] = RECORDER.number_of(self.kind, *RECORDER.kind_key_label(self.name)[1:])
        self.lines = 0  # where the processes' lines begin, in words
        offset = shared.allocate(progress.size * (LINE + self.depth * self._row)) if progress.rank == 0 else 0
        self._agreement = Gather(self.name, self.form, self._agreed, np.array([offset]))

    def ranks_missing(self, which, number):
        """The other ranks whose word `which` is not at `number` yet; this process itself may be late as well."""
        progress = self.shared.progress
        words = self.shared.words[self.lines + which : self.lines + progress.size * LINE // 8 : LINE // 8]
        return set(np.flatnonzero(words < number).tolist()) - {progress.rank}

    def _agreed(self, error):
        if error is not None:
            return  # the progress engine has failed, and ends all that wait
        shared = self.shared
        offset = int(self._agreement.rows[0].view(np.int64)[0])
        rows = shared.address + offset + shared.progress.size * LINE
        for row in range(self.depth * shared.progress.size):
            self.words[ROWS + row] = rows + row * self._row
        self.lines = offset // 8
        self.words[KEY_LINES] = shared.address + offset
        self.words[TURN] = 1
        shared.look()
