"""What a launch that was killed has left is removed by the next one of the same user, and nothing else."""

import os
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from gluon_parallel import leftovers

HERE, USER = socket.gethostname(), os.getuid()
HOLDS = """
import mmap, os, signal, sys
from gluon_parallel.leftovers import temporary_folder
with temporary_folder() as folder:
    for name in sys.argv[1:]:
        with open(name, "r+b") as file:
            globals()[name] = mmap.mmap(file.fileno(), 0)  # which lives on
    os.closerange(3, 1024)  # as a program does that becomes a service
    print(folder, flush=True)
    signal.pause()
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """A function that starts a process with a temporary folder, which maps files; returns both."""
    monkeypatch.setattr(leftovers, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = []

    def start(*names):
        command = [sys.executable, "-c", HOLDS, *map(str, names)]
        process = subprocess.Popen(
            command, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_folders_and_shared_memory_of_killed_processes_are_removed_and_nothing_else(start, tmp_path):
    names = {
        "used": f"sm_segment.{HERE}.{USER}.4b3a0001.0",
        "left": f"sm_segment.{HERE}.{USER}.4b3a0001.1",
        "other host": f"sm_segment.not-{HERE}.{USER}.4b3a0001.0",
        "other user": f"sm_segment.{HERE}.{USER + 1}.4b3a0001.0",
        "other file": "sm_segment.mine",
    }
    for name in names.values():
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "gluon_parallel-mine").mkdir()
    alive, folder = start(tmp_path / names["used"])
    killed, left = start(tmp_path / names["left"])
    leftovers.remove_leftovers()
    assert {path.name for path in tmp_path.iterdir()} >= {*names.values(), *map(os.path.basename, (folder, left))}

    killed.kill()
    assert killed.wait(60) == -signal.SIGKILL and os.path.exists(left)
    leftovers.remove_leftovers()
    kept = {*names.values(), "gluon_parallel-mine", os.path.basename(folder)} - {names["left"]}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_where_proc_is_refused_all_shared_memory_stays(start, tmp_path, monkeypatch):
    file = tmp_path / f"sm_segment.{HERE}.{USER}.4b3a0001.0"
    file.write_bytes(b"x")
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        leftovers.remove_leftovers()
    assert file.exists()
    leftovers.remove_leftovers()
    assert not file.exists()


@pytest.mark.parametrize("is_opened", [False, True])
def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(start, tmp_path, monkeypatch, is_opened):
    make, made = tempfile.mkdtemp, []

    def removed_at_once(prefix):
        made.append(make(prefix=prefix))
        if len(made) == 1 and not is_opened:
            os.rmdir(made[0])
        elif len(made) == 1:
            monkeypatch.setattr(os, "open", lambda *arguments: [open_(*arguments), os.rmdir(made[0])][0])
        else:
            monkeypatch.setattr(os, "open", open_)
        return made[-1]

    open_ = os.open
    monkeypatch.setattr(tempfile, "mkdtemp", removed_at_once)
    with leftovers.temporary_folder() as folder:
        assert folder == made[1] and os.path.isdir(folder)
    assert len(made) == 2 and not os.path.exists(folder)
