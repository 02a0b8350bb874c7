"""A launching thread per device: a public function, and what gives one to loops that are written by hand."""

from .hand_written_loops import launch_by_device
from .parallel_apply import parallel_apply
from .stuck import StuckLoop

__all__ = ["StuckLoop", "launch_by_device", "parallel_apply"]
