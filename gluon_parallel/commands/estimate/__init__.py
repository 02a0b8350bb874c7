"""Command `estimate`: memory, exchanged bytes and expected efficiency of a training, before it is run."""

from .command import configure as configure
from .command import main as main
