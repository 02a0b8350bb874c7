"""Checks that every process of a group runs under pytest: the group is started once, and each check is one test here.

A check is a function ``check_...(store)`` in a file beside this one; :func:`checks` lists those of files. conftest's
fixture `groups` starts a group at the first of its checks and keeps what its processes have reported of all of them.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
WORKER = HERE / "checks_worker.py"


def checks(*files, but=()):
    """The checks of these files, as ``file.py::check_name``, in the order in which they stand there."""
    found = [f"{file}.py::{name}" for file in files for name in re.findall(r"(?m)^def (check_\w+)", _text(file))]
    return [check for check in found if check.rpartition("::check_")[2] not in but]


def _text(file):
    return (HERE / f"{file}.py").read_text("utf-8")


class Group(NamedTuple):
    """A group of processes and the checks that it runs."""

    name: str
    start: object  # function of (number of processes, script, words..., seconds=) -> (exit status, output)
    num: int
    store: str
    checks: list
    variables: dict = {}  # of the environment
    marks: tuple = ()


def each_check(groups):
    """pytest's parameters `group` and `check`: every check of each group."""
    pairs = [
        pytest.param(group, check, marks=group.marks, id=f"{group.name}-{check.rpartition('::check_')[2]}")
        for group in groups
        for check in group.checks
    ]
    return pytest.mark.parametrize(("group", "check"), pairs)


class Groups:
    """Starts each group once, when it is asked for; `tmp_path_factory` gives it a folder for its reports."""

    def __init__(self, tmp_path_factory):
        self._factory, self._reports = tmp_path_factory, {}

    def __getitem__(self, group):
        if group.name not in self._reports:
            self._reports[group.name] = run_group(group, self._factory.mktemp("reports"))
        return self._reports[group.name]


def run_group(group, folder, seconds=280):
    """Run the checks of `group`; `folder` takes their reports."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in group.variables.items():
            patch.setenv(name, value)
        status, output = group.start(group.num, WORKER, group.store, str(folder), *group.checks, seconds=seconds)
    return Reports(group.num, status, output, folder)


class Reports:
    """What the processes of one group said about their checks."""

    def __init__(self, num, status, output, folder):
        self.num, self.status, self.output = num, status, output
        lines = [line for path in sorted(Path(folder).glob("*.jsonl")) for line in path.read_text("utf-8").splitlines()]
        self.reports = [json.loads(line) for line in lines]

    def assert_passed(self, check):
        """Fail with what the processes reported, unless every one of them passed `check` and the group ended well."""
        mine = [report for report in self.reports if report["check"] == check.rpartition("::")[2]]
        for report in mine:
            assert report["passed"], f"process {report['rank']} of {self.num}:\n{report['text']}"
        ranks = [report["rank"] for report in mine]
        assert ranks == list(range(self.num)), f"only processes {ranks} of {self.num} came to its end:\n{self.output}"
        others_failed = any(not report["passed"] for report in self.reports)
        assert self.status == 0 or others_failed, f"the group ended with status {self.status}:\n{self.output}"
