"""`make venv` and make_horovod.sh say in one sentence what is missing and what to do, before anything is fetched."""

import datetime
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

import gluon_parallel as gp

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(shutil.which("sh") is None, reason="there is no shell on this machine")


@pytest.fixture
def make_venv(tmp_path):
    """A function that runs the installer in an environment that holds nothing but what it is given."""

    def run(path="/usr/bin:/bin", **environment):
        environment = {"UV": "", "VENV": str(tmp_path / "venv"), "PATH": path, **environment}
        return subprocess.run(
            ["sh", "scripts/make_venv.sh"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )

    return run


@pytest.fixture
def fake_python(tmp_path):
    """A function that writes a command `name` that behaves as this Python does, with other answers to some programs."""

    def write(name="python", **answers):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        cases = "\n".join(f"*{word}*) {answer};;" for word, answer in answers.items())
        path = folder / name
        path.write_text(f'#!/bin/sh\ncase "$2" in\n{cases}\nesac\nexec {sys.executable} "$@"\n')
        path.chmod(0o755)
        return str(path)

    return write


def one_sentence(done, program="make venv"):
    """What a refusal says: a single line on stderr, and nothing was made."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith(f"{program}: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        *[
            ({"version_info": f"echo {version} /usr; exit 0"}, (f"is Python {version}", "3.9 to 3.13"))
            for version in ("3.8.18", "3.14.0", "2.7.18")
        ],
        ({"ensurepip": "exit 1"}, ("apt-get install python3-venv",)),
        ({"libgomp": "exit 1"}, ("libgomp.so.1", "apt-get install libgomp1")),
        ({"libc_ver": "exit 1"}, ("Alpine",)),
    ],
)
def test_an_interpreter_that_cannot_serve_is_refused_with_what_to_do(make_venv, fake_python, answers, words):
    message = one_sentence(make_venv(PYTHON=fake_python(**answers)))
    assert all(word in message for word in words)


def test_an_interpreter_that_is_not_there_is_named_or_told_how_to_get(make_venv, fake_python):
    assert "PYTHON=python3.99 does not start a Python here" in one_sentence(make_venv(PYTHON="python3.99"))
    said = "echo 'pyenv: python: command not found' >&2; echo 'It exists in:' >&2; echo 3.12.1 >&2; exit 127"
    shim = fake_python("shim", version_info=said)
    told = one_sentence(make_venv(PYTHON=shim))
    assert f"PYTHON={shim} does not start a Python here (pyenv: python: command not found It exists in: 3.12.1" in told
    names = ["python3", "python", *(f"python3.{minor}" for minor in range(9, 14))]
    folder = {Path(fake_python(name, version_info="exit 1")).parent for name in names}.pop()
    assert "apt-get install python3 python3-venv" in one_sentence(make_venv(path=f"{folder}:/usr/bin:/bin"))


def test_a_folder_that_is_no_environment_is_left_alone(make_venv, tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.tex").write_text("all of it")
    message = one_sentence(make_venv(PYTHON=sys.executable))
    assert "is not a virtual environment" in message
    assert (tmp_path / "venv" / "thesis.tex").read_text() == "all of it"


@pytest.mark.parametrize(("compiler", "missing"), [("exit 1", "does not compile C++"), ("exit 0", "built by make")])
def test_a_missing_compiler_or_make_is_told_before_horovod_is_fetched(tmp_path, compiler, missing):
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    (tmp_path / "c++").write_text(f"#!/bin/sh\n{compiler}\n")
    (tmp_path / "c++").chmod(0o755)
    command = [shutil.which("sh"), "scripts/make_horovod.sh"]
    done = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    message = one_sentence(done, "make_horovod.sh")
    assert missing in message and "apt-get install g++ make" in message


def requirements():
    """(name, version, condition) of every line of requirements.txt."""
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version, marker = re.fullmatch(r"([\w.-]+)==(\S+)(?: ; (.+))?", line).groups()
            yield name.lower(), version, Marker(marker or "python_version > '3'")


@pytest.mark.parametrize("minor", range(9, 14))
def test_every_range_of_setup_py_holds_the_version_that_is_pinned(minor):
    source = (ROOT / "setup.py").read_text("utf-8")
    ranges = [Requirement(text) for text in re.findall(r'^(?: {4}|.*\[)"([\w.-]+>=[^"]+)"', source, re.MULTILINE)]
    assert len(ranges) > 20
    python = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.1"}
    pinned = {name: version for name, version, marker in requirements() if marker.evaluate(python)}
    for wanted in ranges:
        assert wanted.specifier.contains(pinned[wanted.name.lower()]), f"{wanted} but {pinned[wanted.name.lower()]}"


def test_the_changelog_begins_with_this_version_and_its_date():
    version, date = re.findall(r"^## (\S+) \(([\d-]+)\)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)[0]
    assert version == gp.__version__ and datetime.date.fromisoformat(date)
    assert f"gluon_parallel-{version}-py3" in (ROOT / "docs" / "howto" / "install.md").read_text("utf-8")


def test_the_extra_all_brings_no_test_tools(monkeypatch):
    made = {}
    monkeypatch.setattr("setuptools.setup", lambda **arguments: made.update(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    extras = made["extras_require"]
    others = extras.keys() - {"all", "test", "cu112", "cu117"}
    assert set(extras["all"]) == {wanted for name in others for wanted in extras[name]}
    assert not set(extras["all"]) & set(extras["test"])
    assert any(wanted.startswith("pytest") for wanted in extras["test"])
