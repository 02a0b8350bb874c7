"""The built wheel, the source archive and a checkout install into new environments, most without any compiler."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import script_files
from interpreters import interpreter

pytestmark = pytest.mark.slow  # each installs from the package index, some everything

ROOT = Path(__file__).resolve().parents[1]
release = script_files.load("release")
# The library is loaded without the rest of the package, which needs MXNet.
LOAD = """
import importlib.util, sys
sys.path += importlib.util.find_spec("gluon_parallel").submodule_search_locations
import native
native.library()
print(native.NATIVE)
"""
# Where the package is, and the name of the wheel that it was installed from.
ORIGIN = """
import importlib.metadata, json, pathlib
import gluon_parallel as gp
url = json.loads(importlib.metadata.distribution("gluon-parallel").read_text("direct_url.json"))["url"]
print(gp.__file__, pathlib.Path(url).name if url.endswith(".whl") else "")
"""


def run(*command, folder, environment=None):
    variables = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", str(folder)), **(environment or {})}
    variables.update((name, value) for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "SSL_")))
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
def bare(tmp_path_factory):
    """Variables of a user without a compiler, and without a home that can be written to."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "sh").symlink_to(shutil.which("sh"))
    cache = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True).stdout.strip()
    return {"PATH": str(folder), "HOME": "/proc/nobody", "PIP_CACHE_DIR": cache or str(folder / "cache")}


@pytest.fixture(scope="module")
def archives(checkout, bare, tmp_path_factory):
    """The folder with the wheel and the source archive, from which ``python -m build`` makes the wheel."""
    folder = tmp_path_factory.mktemp("archives")
    run(sys.executable, "-m", "venv", folder / "venv", folder=folder)
    run(folder / "venv/bin/pip", "install", "--quiet", "build", folder=folder)
    run(
        folder / "venv/bin/python",
        "-m",
        "build",
        "--outdir",
        folder / "dist",
        checkout,
        folder=folder,
        environment=bare,
    )
    return folder / "dist"


def test_it_installs_into_an_empty_environment_and_runs_the_example(checkout, archives, bare, tmp_path):
    """The wheel first, then the checkout over it, so that what both need is installed once.

    By uv where UV names it, as in continuous integration, where pip has made .venv.
    """
    run(sys.executable, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    bin_folder = tmp_path / "venv/bin"
    environment = {**bare, "PATH": f"{bin_folder}:{bare['PATH']}"}
    environment["PIP_NO_COMPILE"] = "1"  # Python compiles what is imported, which takes less
    installer = "pip"
    if uv := os.environ.get("UV"):
        installer, environment["VIRTUAL_ENV"] = f"{shlex.quote(shutil.which(uv))} pip", str(tmp_path / "venv")
        environment["UV_CACHE_DIR"] = run(uv, "cache", "dir", folder=tmp_path).strip()
    (wheel,) = archives.glob("*.whl")
    of_wheel = release.INSTALL.replace("'.[all]'", f"'{wheel}[all]'")
    assert str(wheel) in of_wheel
    for commands in (of_wheel, release.INSTALL):
        words = commands.replace("pip install", f"{installer} install")
        run("sh", "-ec", words, folder=checkout, environment=environment)
        origin = run(bin_folder / "python", "-c", ORIGIN, folder=tmp_path).split()
        assert str(tmp_path) in origin[0]  # nothing is read from the source
        assert origin[1:] == ([] if commands == release.INSTALL else [wheel.name])
        said = run(bin_folder / "python", "-c", release.SCRIPT, folder=tmp_path)
        (accuracy,) = re.findall(r"accuracy', (0\.\d+)", said)
        assert 0.8 < float(accuracy) < 0.95
        assert "gluon-parallel" in run(bin_folder / "gluon-parallel", "--version", folder=tmp_path)


@pytest.mark.parametrize(
    ("minor", "kind", "compiler"),
    [(9, "*.whl", ""), (13, "*.whl", ""), (9, "checkout", ""), (13, "*.tar.gz", "gcc")],
    ids=["wheel-3.9", "wheel-3.13", "editable-3.9", "source-3.13-gcc"],
)
def test_the_c_library_installs_for_the_oldest_and_newest_python(
    checkout, archives, bare, tmp_path, minor, kind, compiler
):
    python = interpreter(minor)
    if python is None or not shutil.which(compiler or python):
        pytest.skip(f"this machine has no Python 3.{minor}, or no {compiler}")
    run(python, "-m", "venv", tmp_path / "venv", folder=tmp_path)
    what = ["--editable", checkout] if kind == "checkout" else [next(archives.glob(kind))]
    environment = {"CC": compiler} if compiler else bare
    run(tmp_path / "venv/bin/pip", "install", "--no-deps", *what, folder=tmp_path, environment=environment)
    folder = run(tmp_path / "venv/bin/python", "-c", LOAD, folder=tmp_path)
    assert folder.startswith(str(checkout if kind == "checkout" else tmp_path))


def test_the_wheel_is_for_every_python_and_glibc_from_2_17_on(archives):
    (wheel,) = archives.glob("*.whl")
    assert re.search(r"-py3-none-manylinux2014_\w+\.whl$", wheel.name)
    with zipfile.ZipFile(wheel) as files:
        (library,) = (name for name in files.namelist() if name.endswith(".so"))
        needed = re.findall(rb"GLIBC_2\.(\d+)", files.read(library))
    assert max(map(int, needed), default=0) <= 17
