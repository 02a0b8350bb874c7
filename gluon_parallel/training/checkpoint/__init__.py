"""The state of a net and its trainer: as named arrays (``state``, ``restore``) and as a file (``save``, ``load``)."""

from .files import load as load
from .files import save as save
from .state import restore as restore
from .state import state as state
