"""Asynchronous training: workers that do not wait for each other, as threads or processes."""

from . import rules as rules
from .policies import MODES as MODES
from .policies import create_store as create_store
from .policies import parse_mode as parse_mode
from .processes import Averaging as Averaging
from .processes import Served as Served
from .processes import check_store as check_store
from .training import Asynchronous as Asynchronous
