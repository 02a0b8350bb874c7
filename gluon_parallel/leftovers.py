"""Leftovers of this user's processes that were killed: temporary folders, and Open MPI's shared memory in /dev/shm."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX, _LOCK = "gluon_parallel-temporary-", "lock"
_SHARED_MEMORY = Path("/dev/shm")
_SEGMENT = re.compile(r"(?:sm|vader)_segment\.(.+)\.(\d+)\.[0-9a-f]+\.\d+")  # host, user, job, rank


def make_folder() -> tuple[str, mmap.mmap]:
    """Make a folder for temporary files; returns it with a mapping of a file in it, for :func:`remove_folder`.

    That file is locked while it is mapped, here or in a fork, also where its descriptor is closed, as by a program
    that closes all; so the folder of a process that was killed is known by being free.
    """
    while True:
        folder = tempfile.mkdtemp(prefix=_PREFIX)
        with contextlib.suppress(FileNotFoundError):  # a launch has removed it, or does so before it is in use
            with _locked(folder, os.O_RDONLY), _locked(Path(folder, _LOCK), os.O_RDWR | os.O_CREAT) as lock:
                os.truncate(lock, 1)
                return folder, mmap.mmap(lock, 1)


def remove_folder(folder: str, lock: mmap.mmap) -> None:
    """Remove what :func:`make_folder` has made."""
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


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


@contextlib.contextmanager
def _locked(path: Path | str, flags: int) -> Iterator[int]:
    """Open and lock what :func:`make_folder` makes, which it does until the folder is in use."""
    opened = os.open(path, flags, 0o600)
    try:
        with contextlib.suppress(OSError):  # of a file system without locks, where nothing is removed either
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield opened
    finally:
        os.close(opened)


def _remove_if_free(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(opened).st_uid != os.getuid():
            return
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(FileNotFoundError), open(folder / _LOCK, "rb") as lock:  # its maker died before it
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(opened)


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
