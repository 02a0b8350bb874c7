"""`notebook`: run a function of a notebook in several processes, and return what it returns there."""

from __future__ import annotations

import inspect
import linecache
import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, Optional

import cloudpickle

from .. import bounds
from ..errors import LaunchError, WorkerFailed, WorkerLost
from ..leftovers import temporary_folder
from .launching import launch

_CALL, _RESULT, _RAISED = "call.pickle", "result-{}.pickle", "raised.{}.pickle"


def notebook(
    function: Callable,
    args: Sequence[Any] = (),
    num_processes: int = 2,
    devices: Optional[str] = None,
    engine: str = "mpi",
    timeout: float = 60.0,
    min_processes: Optional[int] = None,
    max_processes: Optional[int] = None,
    hostfile: Optional[str] = None,
    host_discovery_script: Optional[str] = None,
) -> list:
    """Call ``function(*args)`` in each of several new processes, and wait until none of them is left.

    For notebooks, where there is no script to launch: the function may be defined in a cell. What the processes print
    is shown as it comes, with the rank before every line. Interrupting the kernel ends all of them. What they exchanged
    before a failure is kept in ``runs/flight_recorder``.

    The function, its arguments, and what it uses of the notebook are copied to the processes by cloudpickle. They are
    new ones: a fork of a process that has used MXNet has neither the threads of its engine nor its GPUs. So make
    stores and trainers inside of the function. Each process gets a copy of a net that was made before, on its devices;
    what it trains comes back only by what the function returns.

    Args:
        function: what every process calls; in it, ``gp.kvstore.create("auto")`` or ``gp.prepare`` finds the others.
        args: its arguments.
        num_processes: how many processes, all on this machine.
        devices, engine, timeout: as in :func:`launch`.
        min_processes, max_processes, hostfile, host_discovery_script: as in :func:`launch`: go on without lost
            processes, and have others join. The list that is watched has this machine alone: ``localhost slots=3``.

    Returns:
        What the function returned, in the order of the ranks; with `min_processes`, in those that came to its end.

    Raises:
        LaunchError: nothing could be started: the function or an argument cannot be copied, or as in :func:`launch`.
        WorkerFailed: a process raised, or was killed; holds its traceback. The others were ended.
        KeyboardInterrupt: after Ctrl-C, or when the kernel is interrupted.

    Example:
        >>> import gluon_parallel as gp
        >>> def square_of_rank(offset):
        ...     return gp.kvstore.create("auto").rank ** 2 + offset
        >>> gp.launch.notebook(square_of_rank, (10,), num_processes=2)
        [10, 11]
    """
    if "GLUON_PARALLEL_RANK" in os.environ:
        raise LaunchError("notebook: this process was itself launched as one of several; call the function as it is")
    bounds.whole("num_processes", num_processes, 1, bounds.PROCESSES, LaunchError)
    return call_in_processes(
        function, tuple(args), num_processes, devices, engine, timeout, min_processes=min_processes,
        max_processes=max_processes, hostfile=hostfile, host_discovery_script=host_discovery_script,
    )  # fmt: skip


def call_in_processes(
    function: Callable, args: tuple, num_processes: int, devices: Optional[str], engine: str, timeout: float,
    live: bool = True, min_processes: Optional[int] = None, **others: Any,
) -> list:  # fmt: skip
    """As :func:`notebook`, from a launched process too; what they print is not shown unless the view is `live`."""
    with temporary_folder() as name:
        folder = Path(name)
        (folder / _CALL).write_bytes(_packed(function, args))
        result = launch(
            f"{__package__}.in_notebook", [name], num_processes, engine, devices, timeout=timeout, logs=str(folder),
            live=live, module=True, announces=False, min_processes=min_processes, **others,
        )  # fmt: skip
        failure = result.failure
        if failure is None and min_processes is not None:
            ranks = sorted(int(path.stem.partition("-")[2]) for path in folder.glob(_RESULT.format("*")))
            return [_result(folder / _RESULT.format(rank), rank) for rank in ranks]
        if failure is None:
            return [_result(folder / _RESULT.format(rank), rank) for rank in range(num_processes)]
        if not failure.member:
            raise KeyboardInterrupt
        raise WorkerFailed(_why(folder, failure))


def _why(folder: Path, failure: Any) -> str:
    """The failure in words, with its process's traceback; one that has lost the process that raised may end first."""
    paths = {f"rank {path.suffixes[0][1:]}": path for path in sorted(folder.glob(_RAISED.format("*")))}
    raised = {name: pickle.loads(path.read_bytes()) for name, path in paths.items()}
    causes = [name for name, (_, is_lost, _) in raised.items() if not is_lost]
    name, message = failure.member, failure.message
    if causes and name not in causes and failure.exit_code < 128:  # it was not killed
        name, message = causes[0], f"{causes[0]} (process {raised[causes[0]][0]}) raised"
    # The traceback stands also at the end of the log, whose last lines a message of several lines has.
    return f"{message.splitlines()[0]}\n\n{raised[name][2]}" if name in raised else message


def call_in_process(folder: str) -> None:
    """What each process does: call the function, and write what it returns, or its traceback, into `folder`."""
    rank = os.environ["GLUON_PARALLEL_RANK"]
    try:
        packed = pickle.loads((Path(folder) / _CALL).read_bytes())
        sys.path[:] = packed["path"]
        linecache.cache.update({name: (0, None, lines, name) for name, lines in packed["cells"].items()})
        function, args = cloudpickle.loads(packed["call"])
        result = cloudpickle.dumps(function(*args))
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this frame
        text = "".join(traceback.format_exception(type(error), error, trace))
        raised = os.getpid(), isinstance(error, WorkerLost), text
        (Path(folder) / _RAISED.format(rank)).write_bytes(pickle.dumps(raised))
        raise
    (Path(folder) / _RESULT.format(rank)).write_bytes(result)


def _result(path: Path, rank: int) -> Any:
    if not path.exists():
        raise WorkerFailed(f"rank {rank} ended with status 0 before the function had returned; leave out sys.exit()")
    return cloudpickle.loads(path.read_bytes())


def _packed(function: Callable, args: tuple) -> bytes:
    """The call as bytes, with the source of cells, which tracebacks show, and this process's path of modules."""
    if not callable(function):
        raise LaunchError(f"notebook: got {function!r}; wanted a function, and its arguments as args=(...)")
    try:
        call = cloudpickle.dumps((function, args))
    except Exception as error:  # of any class: the object's own way of being copied has failed
        said = f"cannot be copied to other processes ({error}); make it inside of the function"
        raise LaunchError(f"notebook: {_culprit(function, args)} {said}") from error
    cells = {name: entry[2] for name, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(name)}
    return pickle.dumps({"call": call, "cells": cells, "path": sys.path})


def _culprit(function: Callable, args: tuple) -> str:
    """The argument or the variable that cannot be copied, in words."""
    parts = {f"argument {number}": value for number, value in enumerate(args)}
    name = getattr(function, "__name__", repr(function))
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        variables = {**used.globals, **used.nonlocals}
        parts.update({f"{key!r}, which {name} uses,": value for key, value in variables.items()})
    for text, value in parts.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return text
    return name


if __name__ == "__main__":  # under `gluon-parallel run -m`
    call_in_process(sys.argv[1])
