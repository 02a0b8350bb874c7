"""The memory through which compiled callbacks of one layer meet: made anew when other devices take part."""

from __future__ import annotations

import threading

import numpy as np

from ..kvstore.shared import FUTEX

_MOST = 62  # devices, one bit each


def _compiles(device):
    return device.startswith("cpu(")


class Lane:
    """What `meeting` needs to know of one layer."""

    def __init__(self):
        from . import meeting  # here, as everything that needs Numba

        self._code = meeting
        self.words = np.zeros(meeting.NUM_LAYER_WORDS, np.int64)
        self.is_open = self.words[meeting.OPEN : meeting.OPEN + 1]
        self.names: list[str] = []
        self._blocks = np.zeros(0, np.int64)
        self._earlier_blocks: list[np.ndarray] = []  # somebody may still wait there
        self._known: tuple = ()
        self._lock = threading.Lock()

    def meets_processes(self):
        """Other processes take part, whom Python meets."""
        self.words[self._code.PROCESSES] = 1

    def prepare(self, everyone, only, channels):
        """Before a call: who takes part. What is in flight relies on it, so it changes between steps only.

        Args:
            everyone: names of the devices that the layer lives on; None, too many or a GPU, and all meet in Python.
            only: names of those that take part for now, or None for all.
            channels: of the layer.
        """
        wanted = everyone, only, channels
        if self._known == wanted:
            return
        with self._lock:
            if self._known == wanted:
                return
            code, words = self._code, self.words
            words[code.DEVICES] = words[code.NUM_DEVICES] = 0
            if everyone is not None and len(everyone) <= _MOST and FUTEX and all(map(_compiles, everyone)):
                if self._known[:1] + self._known[2:] != (everyone, channels):
                    self._allocate(sorted(everyone), channels)
                here = everyone if only is None else only & everyone
                words[code.NUM_DEVICES] = len(here)
                words[code.DEVICES] = sum(1 << number for number, name in enumerate(self.names) if name in here)
            self._known = wanted

    def _allocate(self, names, channels):
        code, words = self._code, self.words
        self.names = names
        size = code.NUM_BLOCK_WORDS + (1 + len(names)) * (1 + 2 * channels)
        self._earlier_blocks.append(self._blocks)
        self._blocks = np.zeros(code.NUM_BLOCKS * size, np.int64)
        words[code.BLOCKS], words[code.BLOCK_BYTES] = self._blocks.ctypes.data, size * code.WORD
        words[code.NUM_ROWS], words[code.CHANNELS] = len(names), channels
        self.clear()

    def number(self, device):
        """Of a device, in the order of their names; -1 for strangers, whom Python refuses or meets."""
        return self.names.index(device) if device in self.names else -1

    def clear(self):
        """Forget meetings that never ended; nothing is in flight."""
        size = int(self.words[self._code.BLOCK_BYTES]) // self._code.WORD
        if size:
            self._blocks[self._code.KEY :: size] = self._code.FREE_BLOCK

    def spent(self):
        """Seconds that all devices together have spent in compiled callbacks, by the names of :func:`measured`."""
        code = self._code
        words = {
            "kernels": code.KERNELS,
            "waiting": code.WAITED,
            "exchange": code.EXCHANGED,
            "callbacks": code.CALLBACKS,
        }
        return {name: float(self.words[word]) / 1e9 for name, word in words.items()}
