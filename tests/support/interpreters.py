"""Other Pythons of this machine."""

import os
import shutil
import subprocess
from pathlib import Path


def interpreter(minor):
    """The path of a Python 3.`minor` on this machine, or None."""
    candidates = [shutil.which(f"python3.{minor}"), f"/usr/bin/python3.{minor}", f"/usr/local/bin/python3.{minor}"]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates += sorted(pyenv.glob(f"versions/3.{minor}.*/bin/python3.{minor}"))
    for candidate in filter(None, candidates):
        try:
            done = subprocess.run(
                [candidate, "-c", "import sys; print(sys.version_info[1])"], capture_output=True, text=True, timeout=60
            )
        except OSError:
            continue
        if done.stdout.strip() == str(minor):
            return str(candidate)
    return None
