"""PMIx, the interface of Open MPI to mpirun: outlive mpirun's daemons, and tell MPI which processes are lost."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any

from .. import heartbeat

_LIBRARY = "libpmix.so.2"  # which Open MPI has loaded
# Numbers of the PMIx standard
_ACTION_COMPLETE, _LOST_CONNECTION, _LOST_SERVER, _ENDED = -334, -61, -101, -200
_PROC_LOCAL, _PROC = 7, 22  # a range: this process alone; a type of value

_DONE = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
)
_HANDLER = ctypes.CFUNCTYPE(
    None, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip


class _Process(ctypes.Structure):
    _fields_ = (("job", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


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
    threading.Thread(target=_listen, args=(library,), name="gluon_parallel.launcher", daemon=True).start()


@_HANDLER
def _go_on(*arguments: Any) -> None:
    """The daemon is gone: keep the event from Open MPI's own handler, which would end this process."""
    done, data = arguments[-2:]
    if done:
        _DONE(done)(_ACTION_COMPLETE, None, 0, None, None, data)


def _listen(library: ctypes.CDLL) -> None:
    """Tell MPI of each process that the launcher has lost; until the launcher's agent ends."""
    for line in heartbeat.lines():
        if line.startswith(heartbeat.LOST):
            _tell_mpi(library, int(line[len(heartbeat.LOST) :]))


def _tell_mpi(library: ctypes.CDLL, rank: int) -> None:
    """Have MPI learn that the process `rank` of all has ended, by an event that only this process receives."""
    job = os.environ["PMIX_NAMESPACE"].encode()
    me, lost = _Process(job, int(os.environ["PMIX_RANK"])), _Process(job, rank)
    library.PMIx_Info_create.restype = ctypes.c_void_p
    info = ctypes.c_void_p(library.PMIx_Info_create(ctypes.c_size_t(1)))
    library.PMIx_Info_load(info, b"pmix.evproc", ctypes.byref(lost), ctypes.c_uint16(_PROC))
    arguments = ctypes.byref(me), ctypes.c_uint8(_PROC_LOCAL), info, ctypes.c_size_t(1), None, None
    library.PMIx_Notify_event(_ENDED, *arguments)
    library.PMIx_Info_free(info, ctypes.c_size_t(1))
