"""Launching thread per device: `parallel_apply`, the same for hand-written loops, and loops that are stuck."""

from .hand_written_loops import launch_by_device as launch_by_device
from .stuck import StuckLoop as StuckLoop
from .stuck import note_wait as note_wait
from .thread import call_from as call_from
from .thread import parallel_apply as parallel_apply
