"""Functions inside MXNet's engine: queue them, reach their arrays' memory, pass on their exceptions."""

from . import ending as ending
from .array_memory import make_plain as make_plain
from .array_memory import may_be_blocked as may_be_blocked
from .array_memory import reorder as reorder
from .array_memory import view as view
from .failures import check as check
from .functions import Call as Call
from .functions import fail as fail
from .functions import make_room as make_room
from .functions import mark as mark
from .functions import order as order
from .functions import push as push
from .functions import push_async as push_async
from .functions import settle as settle
from .functions import without_repetition as without_repetition
