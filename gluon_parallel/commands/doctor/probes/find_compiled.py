"""Probe: find the folder in which Numba keeps the package's compiled code, and what is in it."""

import json
import sys
from pathlib import Path


def _example():
    """A function whose code Numba would keep beside that of the package."""


def main():
    """Print Numba's version, its folder, and how many files of the package, the argument, are compiled."""
    import numba

    print("@doctor", json.dumps({"version": numba.__version__}), flush=True)
    package = Path(sys.argv[1])
    try:
        cache = Path(numba.njit(cache=True)(_example).stats.cache_path or "")
    except RuntimeError:  # what Numba says where no folder can be written to
        return
    root = package if package in cache.parents else cache.parent
    print("@doctor", json.dumps({"folder": str(cache if root != package else f"{root}/.../{cache.name}")}), flush=True)
    from gluon_parallel.engine.compiled.functions import _VERSION, SOURCES  # needs MXNet

    files = {Path(name).stem for name in SOURCES if "@compiled(" in (package / name).read_text(encoding="utf-8")}
    tag = f".py{sys.version_info[0]}{sys.version_info[1]}"
    kept = {path.name.partition(".")[0] for path in root.rglob(f"*_{_VERSION}-*{tag}*.nbi")}
    print("@doctor", json.dumps({"kept": len(files & kept), "files": len(files)}), flush=True)


if __name__ == "__main__":
    main()
