"""Exit of a launched process: one that fails ends at once, without waiting for the others."""

import os
import signal
import sys
import sysconfig
import traceback
from pathlib import Path

from ..forks import end_at_once

_STOPPING = "gluon_parallel.training.stopping"  # notes Ctrl-C in place of `interrupt`
_NO_TERMINAL = (
    "gluon_parallel: a launched process has no terminal, so breakpoint() ends it. To debug rank 0, start the processes "
    "with mpirun, which gives rank 0 the terminal: GLUON_PARALLEL_TIMEOUT=3600 mpirun -n 2 python script.py. Any other "
    "rank, from another terminal or an editor: import debugpy; debugpy.listen(5678); debugpy.wait_for_client()"
)
_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_LIBRARIES = tuple(str(Path(sysconfig.get_path(name)).resolve()) + os.sep for name in ("stdlib", "purelib", "platlib"))
_LONGEST = 300  # characters of an error in the launcher's line
LOG_ONLY = "\x02"  # begins the lines that the launcher writes to the log and does not show


def run(main):
    """Call ``main()``, whose result is the exit status; when a launcher started this process, a failure leaves at once.

    Python's way out passes by MXNet's engine and MPI_Finalize, which wait for exchanges that will never complete. So
    the traceback is printed, the others are told the reason, and the process is over; the launcher then ends the
    others.
    """
    if "GLUON_PARALLEL_RANK" not in os.environ:
        return main()
    reason, interrupts = "", []

    def interrupt(number, frame):
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the script may set a handler of its own
        signal.signal(signal.SIGINT, interrupt)
    try:
        status = main()
    except SystemExit as error:
        if error.code in (None, 0):
            raise
        if not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
            _tell(_in_a_line(error))
        reason = f"SystemExit: {error.code}"
        status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt)
        if type(error).__name__ == "WorkerLost":
            launcher, stopping = map(sys.modules.get, ("gluon_parallel.launcher", _STOPPING))
            if launcher is not None:
                launcher.send(launcher.LOST_ANOTHER)
            if stopping is not None and stopping.requested() is not None:
                interrupts.append(stopping.requested())
        location = _location(error)
        if stopped or type(error).__name__ == "WorkerLost":  # what follows from something else
            if stopped or not interrupts:  # after Ctrl-C, that another process has left is no second error
                _print_short(error, location)
        else:
            trace = _from_the_script_on(error.__traceback__)
            traceback.print_exception(type(error), error, trace)
            _tell(f"{_in_a_line(error)}{location and f' ({location})'}")
        if type(error).__name__ == "BdbQuit":
            print(_NO_TERMINAL, file=sys.stderr)
        reason = f"{type(error).__name__}: {error}"
        status = 130 if stopped or interrupts else 1
    if status:
        stores = sys.modules.get("gluon_parallel.kvstore")  # not imported here: a script may do without any store
        if stores is not None:
            stores.tell_others(reason or f"status {status}")
        end_at_once(status & 0xFF or 1)
    return status


def _tell(error):
    """Tell the launcher the error that this process ends by."""
    launcher = sys.modules.get("gluon_parallel.launcher")
    if launcher is not None:
        launcher.send(launcher.RAISED + error)


def _in_a_line(error):
    """An error's class and what it says, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # What MXNet's operators raise begins with the operator's own traceback.
    text = lines[-1] if lines[0].startswith("Traceback") else lines[0]
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."


def _location(error):
    """File and line, as ``train.py:14``, of the script's own code that has raised an error; "" if there is none."""
    locations = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(name, line) for name, line in locations if not os.path.realpath(name).startswith((_PACKAGE, *_LIBRARIES))]
    own = [(name, line) for name, line in own if not name.startswith("<")]  # "<frozen importlib>", "<string>"
    if not own:
        return ""
    name, line = own[-1]
    here = os.getcwd() + os.sep
    return f"{name[len(here) :] if name.startswith(here) else name}:{line}"


def _print_short(error, location):
    """Print an error that follows from something else in three lines at most, with its whole traceback in the log."""
    trace = _from_the_script_on(error.__traceback__)
    whole = "".join(traceback.format_exception(type(error), error, trace, chain=type(error) is not KeyboardInterrupt))
    print("".join(f"{LOG_ONLY}{line}\n" for line in whole.splitlines()), end="", file=sys.stderr)
    print(
        f"{_in_a_line(error)}\n  {location or 'before the script'}; the whole traceback is in the log", file=sys.stderr
    )


def _from_the_script_on(trace):
    """A traceback without the functions of ours that called the script, if it came as far as that."""
    rest = trace
    while rest is not None and os.path.realpath(rest.tb_frame.f_code.co_filename).startswith(_PACKAGE):
        rest = rest.tb_next
    return rest or trace
