"""The built wheel, the source archive and a checkout install into empty environments, by the README's commands."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each installs everything from the package index, and compiles the kernels

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
COMMANDS = re.search(r"^pip install --no-deps -r requirements-mxnet\.txt && pip install .*$", README, re.MULTILINE)[0]
EXAMPLE = next(
    code for code in re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE) if "gp.DataParallel" in code
)


def run(*command, folder, environment=None):
    variables = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", str(folder)), **(environment or {})}
    variables.update((name, value) for name, value in os.environ.items() if name.startswith(("PIP_", "UV_")))
    done = subprocess.run(command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=900)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the project without what tools have left in it."""
    folder = tmp_path_factory.mktemp("checkout") / "gluon_parallel"
    left = ".git", ".venv*", "build", "runs", "data", "__pycache__", "*.egg-info", ".*_cache"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*left))
    return folder


@pytest.fixture(scope="module")
def archives(checkout, tmp_path_factory):
    """The folder with the wheel and the source archive that ``python -m build`` makes."""
    folder = tmp_path_factory.mktemp("archives")
    run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    run(folder / "venv/bin/pip", "install", "--quiet", "build", folder=folder)
    run(folder / "venv/bin/python", "-m", "build", "--outdir", folder / "dist", checkout, folder=folder)
    return folder / "dist"


@pytest.mark.parametrize("kind", ["checkout", "*.whl", "*.tar.gz"])
def test_it_installs_into_an_empty_environment_and_runs_the_example(checkout, archives, tmp_path, kind):
    run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    bin_folder = tmp_path / "venv/bin"
    commands, environment = COMMANDS, {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    if kind != "checkout":
        (archive,) = archives.glob(kind)
        commands = COMMANDS.replace("'.[all]'", f"'{archive}[all]'")
        assert str(archive) in commands
        environment["PIP_NO_COMPILE"] = "1"  # Python compiles what is imported, which takes less
    run("sh", "-ec", commands, folder=checkout, environment=environment)
    if kind != "checkout":  # nothing of it is read from the source
        assert str(tmp_path) in run(
            bin_folder / "python", "-c", "import gluon_parallel as gp; print(gp)", folder=tmp_path
        )
    said = run(bin_folder / "python", "-c", EXAMPLE, folder=tmp_path)
    (accuracy,) = re.findall(r"accuracy', (0\.\d+)", said)
    assert 0.8 < float(accuracy) < 0.95
    assert "gluon-parallel" in run(bin_folder / "gluon-parallel", "--version", folder=tmp_path)
