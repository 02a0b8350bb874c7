"""Probe: ask NVIDIA's driver what it is and which cards it has, and load the CUDA libraries as the import does."""

import json
import sys
from pathlib import Path


def main():
    """Print the answers; the arguments are the package's folder, MXNet's, and the libraries that MXNet asks for."""
    package, folder, *names = sys.argv[1:]
    sys.path.insert(0, package)  # `import gluon_parallel` would need MXNet
    from cuda import driver, libraries

    print("@doctor", json.dumps({"driver": driver.ask()}), flush=True)
    missing = libraries.load(Path(folder), names)
    print("@doctor", json.dumps({"missing": missing, "nvrtc": libraries.nvrtc_version() if names else 0}), flush=True)


if __name__ == "__main__":
    main()
