"""Probe: import NumPy."""

import json
import os


def main():
    """Print NumPy's version and folder."""
    import numpy

    numpy.dot(numpy.ones((8, 8)), numpy.ones((8, 8)))  # its linear algebra is a library of its own
    print("@doctor", json.dumps({"version": numpy.__version__, "folder": os.path.dirname(numpy.__file__)}), flush=True)


if __name__ == "__main__":
    main()
