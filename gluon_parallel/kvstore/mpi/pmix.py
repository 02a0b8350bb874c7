"""PMIx, by which Open MPI speaks to mpirun: outlive its daemons, tell of losses, offer addresses, start processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ... import launcher

_LIBRARY = "libpmix.so.2"  # which Open MPI has loaded
# Numbers of the PMIx standard
_ACTION_COMPLETE, _LOST_CONNECTION, _LOST_SERVER, _ENDED, _UNREACHABLE = -334, -61, -101, -200, -25
_PROC_LOCAL, _GLOBAL = 7, 3  # a range: this process alone; a scope: all processes
_BOOL, _STRING, _INT, _PROC, _BYTES = 1, 3, 6, 22, 27  # types of values
_KEY = b"gluon_parallel.addresses"
_AGAIN = 0.2  # seconds after which MPI is told again of a loss
_ANSWERS_TO_NUMBERS = 8  # two for each number of a communicator that processes try

_DONE = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
_HANDLER = ctypes.CFUNCTYPE(
    None, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip


class _Process(ctypes.Structure):
    _fields_ = (("job", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Buffer(ctypes.Structure):  # pmix_data_buffer_t
    _fields_ = (
        ("bytes", ctypes.c_void_p),
        ("positions", ctypes.c_void_p * 2),
        ("room", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
    )


def follow_launcher() -> None:
    """Believe the launcher rather than mpirun: about which processes are lost, and when this one has to end.

    mpirun ends when it loses a host, and Open MPI then ends every process. MPI itself does not notice a host whose
    network is gone. Where Open MPI has no such library, it stays as it is.
    """
    try:
        library = ctypes.CDLL(_LIBRARY)
        codes = (ctypes.c_int * 2)(_LOST_CONNECTION, _LOST_SERVER)
        library.PMIx_Register_event_handler(
            codes, ctypes.c_size_t(len(codes)), None, ctypes.c_size_t(0), _go_on, None, None
        )
    except (OSError, AttributeError):
        return

    def note_loss(text: str) -> None:
        number = int(text)
        _tell_mpi(library, number)
        _lost.add(number)  # before the look at the ports: `met_at` does it the other way round
        if (port := _ports.get(number)) is not None:
            _end_meeting(number, port)

    launcher.listen(launcher.LOST, note_loss)


@_HANDLER
def _go_on(*arguments: Any) -> None:
    """The daemon is gone: keep the event from Open MPI's own handler, which would end this process."""
    done, data = arguments[-2:]
    if done:
        _DONE(done)(_ACTION_COMPLETE, None, 0, None, None, data)


# number -> (job, rank in it) of processes that have met those of another job
process_names: dict[int, tuple[str, int]] = {}
_ports: dict[int, str] = {}  # number -> port of a new process that this one meets
_lost: set[int] = set()  # numbers of processes that are lost


@contextlib.contextmanager
def met_at(number: int, port: str) -> Iterator[None]:
    """Within this block, MPI's Connect to that port ends if the process of that number is lost, or is so already."""
    _ports[number] = port
    try:
        if number in _lost:
            _end_meeting(number, port)
        yield
    finally:
        del _ports[number]


def is_lost(number: int) -> bool:
    """Whether the launcher has said that the process of that number is lost."""
    return number in _lost


def own_process_name() -> tuple[str, int]:
    """The job of this process, and its rank in it; as mpirun calls them."""
    return os.environ["PMIX_NAMESPACE"], int(os.environ["PMIX_RANK"])


def _tell_mpi(library: ctypes.CDLL, number: int) -> None:
    """Have MPI learn that the process of that number has ended, by an event that only this process receives."""
    own_job, own_rank = own_process_name()
    job, rank = process_names.get(number, (own_job, number))
    me, lost = _Process(own_job.encode(), own_rank), _Process(job.encode(), rank)
    info = _info(library, b"pmix.evproc", ctypes.byref(lost), _PROC)
    arguments = ctypes.byref(me), ctypes.c_uint8(_PROC_LOCAL), info, ctypes.c_size_t(1), None, None
    library.PMIx_Notify_event(_ENDED, *arguments)
    library.PMIx_Info_free(info, ctypes.c_size_t(1))


def _info(library: ctypes.CDLL, name: bytes, value: Any, kind: int) -> ctypes.c_void_p:
    """An array of one info of PMIx."""
    library.PMIx_Info_create.restype = ctypes.c_void_p
    info = ctypes.c_void_p(library.PMIx_Info_create(ctypes.c_size_t(1)))
    library.PMIx_Info_load(info, name, value, ctypes.c_uint16(kind))
    return info


def _end_meeting(number: int, port: str) -> None:
    """Have MPI give up the meeting with a process that is lost, which it may not know yet, or have heard of before."""
    library = ctypes.CDLL(_LIBRARY)

    def tell_again() -> None:
        _end_wait(library, port)
        while number in _ports:
            _tell_mpi(library, number)
            time.sleep(_AGAIN)

    threading.Thread(target=tell_again, name="gluon_parallel.loss", daemon=True).start()


def _end_wait(library: ctypes.CDLL, port: str) -> None:
    """Answer in MPI's Connect for the process that had opened that port and is lost.

    Process 0 waits in a function of PMIx, up to ten minutes for each answer. In the first step it waits for the names
    of the processes that accept. The answer sent here names a whole job but not its number of processes: Open MPI
    refuses that in every process, so Connect fails in all of them. While process 0 looks for the communicator's number,
    text in the place of bytes makes it fail. In the last step, Open MPI ignores a failure, and sends nothing to the
    other processes, which would wait for it. So there it gets a valid answer.
    """
    one, buffer = ctypes.c_size_t(1), _Buffer()
    answers: dict[str, tuple[Any, int]] = {"accept": (f"{own_process_name()[0]}.*".encode(), _STRING)}
    for number in range(_ANSWERS_TO_NUMBERS):
        answers[f"nextcid:recv:{number}"] = b"it is lost", _STRING
    if library.PMIx_Data_pack(None, ctypes.byref(buffer), ctypes.byref(ctypes.c_int(1)), 1, ctypes.c_uint16(_INT)) == 0:
        packed = (ctypes.c_size_t * 2)(buffer.bytes, buffer.size)
        answers["activate:recv:0"] = ctypes.byref(packed), _BYTES
    for key, (value, kind) in answers.items():
        info = _info(library, f"{port}:{key}".encode(), value, kind)
        library.PMIx_Publish(info, one)
        library.PMIx_Info_free(info, one)
    library.PMIx_Data_buffer_destruct(ctypes.byref(buffer))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("text", ctypes.c_char_p), ("others", ctypes.c_char * 32))


def offer_addresses() -> None:
    """Let processes of other jobs get the addresses of this one, which come with the value of this key.

    `PMIx_Connect` in ``native/open_mpi.c`` gets them. OSError: there is no library of PMIx.
    """
    library, value = ctypes.CDLL(_LIBRARY), _Value(_STRING, b"yes")
    status = library.PMIx_Put(ctypes.c_uint8(_GLOBAL), _KEY, ctypes.byref(value)) or library.PMIx_Commit()
    if status:
        raise OSError(f"error {status} of PMIx")


class _Program(ctypes.Structure):
    _fields_ = (
        ("command", ctypes.c_char_p), ("arguments", ctypes.POINTER(ctypes.c_char_p)),
        ("environment", ctypes.POINTER(ctypes.c_char_p)), ("folder", ctypes.c_char_p), ("number", ctypes.c_int),
        ("info", ctypes.c_void_p), ("num_info", ctypes.c_size_t),
    )  # fmt: skip


def spawn(argv: Sequence[str], environment: Mapping[str, str], folder: str) -> None:
    """Start a process in a job of its own, beside those that run; returns before it has come. It calls nothing of MPI.

    Args:
        environment: variables on top of those of mpirun, which it has.
        folder: its working directory.

    Raises:
        OSError: there is no library of PMIx, mpirun has ended, or could not start it (has PMIx's number of the error).
    """
    library = ctypes.CDLL(_LIBRARY)
    variables = {"OMPI_MCA_mpi_ft_enable": "1", **environment}  # else it is ended when another process dies
    program = _Program(
        argv[0].encode(), _strings(argv), _strings([f"{name}={value}" for name, value in variables.items()]),
        folder.encode(), 1, None, 0,
    )  # fmt: skip
    # Else mpirun ends its whole job, and those that it has met, when it dies.
    info = _info(library, b"pmix.recover", ctypes.byref(ctypes.c_bool(True)), _BOOL)
    one = ctypes.c_size_t(1)
    status = library.PMIx_Spawn(info, one, ctypes.byref(program), one, ctypes.create_string_buffer(256))
    library.PMIx_Info_free(info, one)
    if status:
        why = "it has ended" if status == _UNREACHABLE else f"error {status} of PMIx"
        raise OSError(f"mpirun starts no further process: {why}")


def _strings(words: Sequence[str]) -> Any:
    return (ctypes.c_char_p * (len(words) + 1))(*(word.encode() for word in words), None)
