"""What runs without Python's lock: the passes of the operator, their arithmetic, and how devices wait. Needs Numba."""

from ..operator_state import helper
from . import c_functions

# Before any compiled code is loaded, which looks these functions up by name.
for _name in ("meet", "exchange", "fail"):
    c_functions.define(f"gluon_parallel_sync_batch_norm_{_name}", helper(_name))
