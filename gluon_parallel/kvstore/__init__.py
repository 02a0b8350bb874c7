"""KVStores, through which processes sum their gradients: MXNet's own, and those that this package adds."""

from ..environment import joins as joins
from ..environment import may_join as may_join
from . import clients as clients
from . import exchange as exchange
from . import separate_training as separate_training
from .collective import collective as collective
from .collective import outermost as outermost
from .factory import NAMES as NAMES
from .factory import as_store as as_store
from .factory import connects_processes as connects_processes
from .factory import create as create
from .groups import SyncGroups as SyncGroups
from .groups import check_sync_group as check_sync_group
from .groups import group as group
from .groups import sync_group as sync_group
from .mpi.startup import leave_because as leave_because
from .mpi.startup import tell_others as tell_others
from .together import repeats as repeats
from .together import together as together
