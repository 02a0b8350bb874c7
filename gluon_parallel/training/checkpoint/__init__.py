"""The state of a net and its trainer: as named arrays (``state``, ``restore``) and as a file (``save``, ``load``)."""

from .files import load, save
from .state import restore, state

__all__ = ["load", "restore", "save", "state"]
