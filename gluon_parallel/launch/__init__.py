"""`launch`: run one script as several processes on one or many hosts, end them together, restart them.

:func:`launch` checks what was asked for and starts a :class:`.Launcher`; :class:`.Decisions` say what happens to it.
"""

from . import worker as worker
from .in_notebook import notebook as notebook
from .launching import Result as Result
from .launching import add_script_arguments as add_script_arguments
from .launching import configure as configure
from .launching import launch as launch
from .launching import main as main
from .member import Failure as Failure
