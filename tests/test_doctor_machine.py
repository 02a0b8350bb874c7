"""`gluon-parallel doctor` on machines that lack cores, memory or folders, or have variables that stop training."""

import errno
import os
import subprocess
import sys

import pytest
from doctor_checks import Says, some_seconds, the_finding

from gluon_parallel.commands.doctor import machine, mxnet_build


def test_one_core_is_named(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    verdict, said = the_finding(machine.check_processor(some_seconds(OMP_NUM_THREADS="1")))
    assert verdict == "warning" and "one core only" in said


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OMP_NUM_THREADS": "16"}, "OMP_NUM_THREADS is 16, but this process may use 8"),
        ({"MXNET_OMP_MAX_THREADS": "1"}, "of 8 cores, two devices use 2"),
    ],
)
def test_variables_that_waste_the_cores_are_named(variables, words):
    [finding] = machine.judge_processor(8, variables)
    assert words in finding.text and finding.cure == f"unset {next(iter(variables))}"
    assert list(machine.judge_processor(8, {"OMP_NUM_THREADS": "4"})) == []


def test_no_shared_memory_one_that_cannot_be_written_and_a_small_one_are_named(tmp_path, monkeypatch):
    verdict, said = the_finding(machine.check_shared_memory(some_seconds(), str(tmp_path / "shm")))
    assert verdict == "failed" and "is not there" in said and "mount -t tmpfs" in said
    size = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda folder: size)
    if size.f_bavail * size.f_frsize > 1 << 28:
        verdict, said = the_finding(machine.check_shared_memory(some_seconds(), "/proc"))
        assert verdict == "failed" and "cannot be written to" in said
    small = os.statvfs_result((4096, 4096, 1 << 14, 1 << 14, 1 << 14, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: small)
    verdict, said = the_finding(machine.check_shared_memory(some_seconds(), str(tmp_path)))
    assert verdict == "warning" and "64 MB free" in said and "--shm-size=1g" in said


def test_shared_memory_that_is_read_only_is_mounted_again(tmp_path, monkeypatch):
    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    said = [the_finding(machine.check_shared_memory(some_seconds(), "/dev/shm"))[1]]
    assert said == [
        "/dev/shm cannot be written to: Read-only file system. Data loaders with num_workers > 0 need it. -> "
        "mount -o remount,rw /dev/shm, or docker run --shm-size=1g"
    ]


def test_without_a_folder_for_temporary_files_the_doctor_goes_on_in_shared_memory(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/proc")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [os.environ["TMPDIR"], "/proc"])
    verdict, said = the_finding(machine.check_temporary_files(some_seconds()))
    assert verdict == "failed" and "No folder for temporary files" in said and "export TMPDIR=/dev/shm" in said
    assert some_seconds().run(["sh", "-c", "echo $TMPDIR"]).output == "/dev/shm"


def test_little_memory_is_named(monkeypatch):
    monkeypatch.setattr(machine, "read", lambda path: "MemTotal: 2048000 kB\nMemAvailable: 204800 kB\n")
    verdict, said = the_finding(machine.check_memory(some_seconds()))
    assert verdict == "warning" and "Only 200 MB" in said


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("  what():  Invalid Parameter format for OMP_NUM_THREADS expect int but value='abc'\n", "OMP_NUM_THREADS"),
        ("MXNetError: Cannot find Engine naive\n", "MXNET_ENGINE_TYPE"),
    ],
)
def test_a_value_that_mxnet_cannot_read_is_named_as_mxnet_does(output, name):
    verdict, said = the_finding(mxnet_build.check_mxnet(Says({}, -6, output)))
    assert verdict == "failed" and f"MXNet cannot read {name}=" in said and said.endswith(f" -> unset {name}")


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({"DMLC_ROLE": "worker"}, "warning"),
        ({"DMLC_NUM_WORKER": "1", "DMLC_PS_ROOT_URI": "10.0.0.1"}, "warning"),
        ({"DMLC_NUM_WORKER": "2", "DMLC_ROLE": "worker"}, "failed"),
        ({"DMLC_ROLE": "server"}, "failed"),
    ],
)
def test_what_a_launcher_has_left_behind_is_named(values, verdict):
    [finding] = machine.judge_variables({**values, "DMLC_INTERFACE": "eth0", "PS_VERBOSE": "1"})
    assert finding.verdict == verdict and finding.cure == f"unset {' '.join(values)}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [("MXNET_ENGINE_TYPE", "NaiveEngine"), ("MXNET_CPU_WORKER_NTHREADS", "abc")],
)
def test_the_advice_begins_with_the_variable_that_is_the_cause(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    done = subprocess.run(
        [sys.executable, "-m", "gluon_parallel", "doctor", "--timeout", "200"], env=os.environ, text=True,
        stdin=subprocess.DEVNULL, capture_output=True, timeout=220,
    )  # fmt: skip
    _, summary, advice, *_ = done.stdout.splitlines()
    assert done.returncode == 1 and summary.startswith("Training does NOT work here; failed: ")
    assert advice.startswith("Begin with ") and advice.endswith(f": unset {name}")
