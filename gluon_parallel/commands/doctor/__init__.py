"""Command `doctor`: a report on this installation and machine, which also works where MXNet cannot be imported."""

from .command import configure as configure
from .command import main as main
