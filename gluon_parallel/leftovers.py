"""Leftovers of this user's processes that were killed: temporary folders, and Open MPI's shared memory in /dev/shm."""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "gluon_parallel-temporary-"
_SHARED_MEMORY = Path("/dev/shm")
_SEGMENT = re.compile(r"(?:sm|vader)_segment\.(.+)\.(\d+)\.[0-9a-f]+\.\d+")  # host, user, job, rank


def make_folder() -> tuple[str, int]:
    """Make a folder for temporary files; returns it with a descriptor for :func:`remove_folder`.

    It is locked while the descriptor is open, here or in a fork; so the folder of a process that was killed is known
    by being free.
    """
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        try:
            lock = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # a launch has removed it, which may also happen before it is locked
            continue
        with contextlib.suppress(OSError):  # of a file system without locks, where nothing is removed either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(folder):
            return folder, lock
        os.close(lock)


def remove_folder(folder: str, lock: int) -> None:
    """Remove what :func:`make_folder` has made."""
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


@contextlib.contextmanager
def temporary_folder() -> Iterator[str]:
    """A new folder for temporary files, which is removed at the end of the block."""
    folder, lock = make_folder()
    try:
        yield folder
    finally:
        remove_folder(folder, lock)


def remove_leftovers() -> None:
    """Remove what processes of this user on this machine have left that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is locked, or another launch removes it
            _remove_if_free(folder)
    # All that is there now is open or mapped in the process that made it, for as long as that lives.
    here = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    found = [(path, _SEGMENT.fullmatch(path.name)) for path in _SHARED_MEMORY.glob("*_segment.*")]
    ours = [path for path, name in found if name and name[1] in here and name[2] == str(os.getuid())]
    for path in {*map(str, ours)} - _used_files() if ours and _sees_processes() else ():
        with contextlib.suppress(FileNotFoundError):  # another launch does the same
            os.unlink(path)


def _sees_processes() -> bool:
    """Whether /proc says what a process like this one uses; if it is refused, all files stay."""
    return os.access("/proc/self/maps", os.R_OK) and os.access("/proc/self/fd", os.R_OK | os.X_OK)


def _remove_if_free(folder: Path) -> None:
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(lock).st_uid == os.getuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _used_files() -> set[str]:
    """The files that this user's processes have open or mapped."""
    used = set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended; or it is a service that nobody may look at
            if process.stat().st_uid != os.getuid():
                continue
            for number in (process / "fd").iterdir():  # before the maps: a file is mapped before it is closed
                with contextlib.suppress(FileNotFoundError):  # it has been closed
                    used.add(os.readlink(number))
            maps = (process / "maps").read_text("utf-8", "replace")
            used.update(fields[5] for fields in (line.split(maxsplit=5) for line in maps.splitlines()) if fields[5:])
    return used
