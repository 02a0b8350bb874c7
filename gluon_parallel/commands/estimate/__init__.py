"""Command `estimate`: memory and exchanged bytes of a training, before it is run."""

from .command import configure as configure
from .command import main as main
