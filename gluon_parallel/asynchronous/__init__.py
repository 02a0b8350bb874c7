"""Asynchronous data-parallel training: replicas of a net that wait for each other as much as one setting says."""

from . import rules
from .flat_net import FlatNet
from .mode import MODES, parse_mode
from .policies import create_store
from .processes import Averaging, check_store
from .served import Served
from .simulator import Worker, hiccups, simulate, steady, uneven
from .training import Asynchronous

__all__ = [
    "MODES",
    "Asynchronous",
    "Averaging",
    "FlatNet",
    "Served",
    "Worker",
    "check_store",
    "create_store",
    "hiccups",
    "parse_mode",
    "rules",
    "simulate",
    "steady",
    "uneven",
]
