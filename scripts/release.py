"""Build the wheel and the source archive of the last commit, and train with each on the oldest and the newest Python.

    python scripts/release.py        `make release`, which then builds the site

The archives are left in `dist`. README's command installs each into empty environments, and README's script runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import interpreters  # noqa: E402

DIST, MINORS = ROOT / "dist", (9, 13)
README = (ROOT / "README.md").read_text("utf-8")
[INSTALL] = re.findall(r"^pip install --no-deps -r requirements-mxnet\.txt && pip install .*$", README, re.MULTILINE)
[SCRIPT] = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def run(*command, folder=ROOT, **options):
    """What a command prints; ends this program if it fails."""
    done = subprocess.run(list(map(str, command)), cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          **options)  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{done.stdout}{done.stderr}\n{command[0]} has failed in {folder}")
    return done.stdout


def build(checkout, folder):
    """Build the wheel and the source archive into `dist`, and return their paths."""
    run(sys.executable, "-m", "venv", folder)
    run(folder / "bin/pip", "install", "--quiet", "build")
    shutil.rmtree(DIST, ignore_errors=True)
    run(folder / "bin/python", "-m", "build", "--outdir", DIST, checkout)
    return sorted(DIST.iterdir())


def check(archive, python, checkout, folder):
    """Install an archive into a new environment in `folder`, and return the accuracy that README's script prints."""
    run(python, "-m", "venv", folder)
    path = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    run("sh", "-ec", INSTALL.replace("'.[all]'", f"'{archive}[all]'"), folder=checkout, env=path)
    (accuracy,) = re.findall(r"accuracy', (0\.\d+)", run(folder / "bin/python", "-c", SCRIPT, folder=folder))
    if not 0.8 < float(accuracy) < 0.95:
        sys.exit(f"{archive.name}: README's script ends at an accuracy of {accuracy}")
    return accuracy


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    pythons = {minor: interpreters.interpreter(minor) for minor in MINORS}
    if missing := ", ".join(f"3.{minor}" for minor, python in pythons.items() if python is None):
        sys.exit(f"make release: this machine has no Python {missing}; install it, for instance by pyenv, or on PATH")
    if changed := run("git", "status", "--porcelain"):
        sys.exit(f"make release: these files are not committed:\n{changed}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("git", "clone", "--quiet", ROOT, folder / "checkout")
        for archive in build(folder / "checkout", folder / "build"):
            for minor, python in pythons.items():
                accuracy = check(archive, python, folder / "checkout", folder / f"{archive.suffix}-{minor}")
                print(
                    f"{archive.name} on Python 3.{minor}: README's script ends at an accuracy of {accuracy}", flush=True
                )


if __name__ == "__main__":
    main()
