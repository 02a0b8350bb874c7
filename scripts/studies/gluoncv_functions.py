"""GluonCV's and GluonNLP's functions, layers and losses, each run once: to compare one NumPy with another.

    python scripts/studies/gluoncv_functions.py before.json             in an environment with NumPy 1.23
    python scripts/studies/gluoncv_functions.py --compare before.json   in one with another NumPy: prints what differs

It ends with status 1 if a function fails, or computes something else. Functions of GluonNLP are left out where that is
not installed (`pip install --no-deps gluonnlp==0.10.0`, up to Python 3.10). `sh scripts/make_venv.sh --help` says how
an environment with an older NumPy is made. Without arguments it prints what fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import random
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union

import numpy as np

import gluon_parallel as gp
import mxnet as mx

import gluoncv_layers
import gluoncv_metrics
import gluoncv_transforms
import gluonnlp_calls

GROUPS = (
    gluoncv_transforms.losses, gluoncv_transforms.presets, gluoncv_transforms.transforms, gluoncv_layers.layers,
    gluoncv_metrics.metrics, gluoncv_metrics.data, gluoncv_layers.nets, gluonnlp_calls.gluonnlp,
)  # fmt: skip
Array = list[float]  # its shape, the sum of its absolute values, and a sum with weights that rise along it
Found = Union[list[Array], str]  # the arrays that a function returns, or its error


def arrays(value: Any) -> Iterator[Array]:
    """What stands for each of the arrays and numbers in a nested value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)) and any(not np.isscalar(one) for one in value):
        for one in value:
            yield from arrays(one)
        return
    array = np.asarray(value.asnumpy() if isinstance(value, mx.nd.NDArray) else value)
    if array.dtype.kind in "biuf":
        flat = np.nan_to_num(array.astype("float64").ravel(), nan=-1.0)  # NaN would be equal to nothing
        rising = float(flat @ np.linspace(0.5, 1, flat.size))
        yield [*map(float, array.shape), float(np.abs(flat).sum()), rising]


def results(names: list[str]) -> dict[str, Found]:
    """What each function returns, of all those, or of the groups of these names."""
    found: dict[str, Found] = {}
    for group in GROUPS:
        if names and group.__name__ not in names:
            continue
        for name, case in group().items():
            gp.reseed(0)
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002  (GluonCV draws from it)
            mx.random.seed(0)
            try:
                with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                    warnings.simplefilter("ignore")
                    found[name] = list(arrays(case()))
            except Exception as error:
                last = str(error).strip().splitlines()[-1:]  # MXNet's errors begin with their traceback
                found[name] = f"{type(error).__name__}: {''.join(last)[:160]}"
    return found


def is_same(one: Found, other: Found, tolerance: float) -> bool:
    """Whether two results are the same, up to this part of the sum of an array's absolute values."""
    if isinstance(one, str) or isinstance(other, str) or len(one) != len(other):
        return False
    near = [
        abs(a - b) <= tolerance * first[-2] + 1e-3 for first, second in zip(one, other) for a, b in zip(first, second)
    ]
    return all(near) and [len(array) for array in one] == [len(array) for array in other]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("write", nargs="?", help="a file for the results")
    parser.add_argument("--compare", help="a file with the results of another environment")
    parser.add_argument("--only", nargs="+", default=[], help="groups: " + " ".join(one.__name__ for one in GROUPS))
    flags = parser.parse_args()
    here = results(flags.only)
    opencv = importlib.metadata.version("opencv-python-headless")
    if flags.write:
        Path(flags.write).write_text(json.dumps({"opencv": opencv, "results": here}))
    compared: dict[str, Any] = {"opencv": opencv, "results": {}}
    if flags.compare:
        compared = json.loads(Path(flags.compare).read_text())
    before = compared["results"]
    # float32 sums in another order; OpenCV 5 turns images, and draws text, otherwise than OpenCV 4
    tolerance = 2e-3 if compared["opencv"] == opencv else 2e-2
    failed = {name: said for name, said in here.items() if isinstance(said, str)}
    ended = [name for name in here if name in before and name not in failed]
    other = [name for name in ended if not is_same(here[name], before[name], tolerance)]
    for name, said in failed.items():
        print(f"{name}: {said}" + (f" (before: {before[name]})" if isinstance(before.get(name), str) else ""))
    for name in other:
        print(f"{name}: {here[name]}, before {before[name]}")
    print(f"NumPy {np.__version__}: {len(here)} run, {len(failed)} failed, {len(other)} computed something else")
    return 1 if failed or other else 0


if __name__ == "__main__":
    sys.exit(main())
