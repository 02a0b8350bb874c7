"""Flight recorder: what a process exchanged last, kept in memory and written when the processes cannot go on."""

from .report import CALL as CALL
from .report import WHERE as WHERE
from .report import advice as advice
from .report import gave_up as gave_up
from .report import start as start
from .report import write as write
from .ring import RECORDER as RECORDER
from .ring import StoreRecords as StoreRecords
from .ring import move_to_shared_memory as move_to_shared_memory
