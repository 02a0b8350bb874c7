"""Make MXNet 1.9.1 import and run on today's Python and NumPy.

Names that NumPy 1.24, NumPy 2 and Python 3.12 removed are put back into the *running* interpreter before MXNet is
imported; nothing on disk is touched, and no name that NumPy still has is replaced.
"""

import contextlib
import ctypes
import importlib
import os
import re
import sys
import types
import warnings
from typing import Any

import numpy as np

from ...errors import MXNetUnavailable
from ..cuda import mxnet_folder, prepare
from . import after_import, deferred, gluon_packages, numpy_protocol, onnx_export, operator_code, roi_align, scalars

MXNET_VERSION = "1.9.1"

INSTALL = (
    "pip install --no-deps 'mxnet==1.9.1' (or, for NVIDIA GPUs, mxnet-cu112 or mxnet-cu117); "
    "--no-deps because its metadata asks for numpy<2, which newer Pythons do not have"
)

# What MXNet 1.9.1 and GluonCV 0.10.5 look up in NumPy and NumPy 1.24 to 2.5 no longer have.
# The aliases meant the Python types and constants; the functions were renamed.
_REMOVED_VALUES = {
    "bool": bool, "int": int, "float": float, "object": object,
    "compat": types.SimpleNamespace(basestring=str),
    "PZERO": 0.0, "NZERO": -0.0, "PINF": np.inf, "NINF": -np.inf, "Inf": np.inf, "NaN": np.nan, "NAN": np.nan,
}  # fmt: skip
_RENAMED_FUNCTIONS = {
    "alltrue": "all", "sometrue": "any", "product": "prod", "cumproduct": "cumprod",
    "in1d": "isin", "trapz": "trapezoid", "round_": "round", "row_stack": "vstack",
}  # fmt: skip
# `mxnet.numpy` only re-exports these; they left NumPy 1.20 for a package of their own.
_FINANCIAL_FUNCTIONS = ("fv", "ipmt", "irr", "mirr", "nper", "npv", "pmt", "ppmt", "pv", "rate")


def _financial(*_args, **_kwargs):
    raise NotImplementedError("financial functions left NumPy in version 1.20; install numpy-financial for them")


def _msort(a):
    """NumPy's own definition of the removed ``np.msort``: a copy of `a` sorted along its first axis."""
    return np.sort(a, axis=0)


def restore_numpy_names():
    """Put back the NumPy names that MXNet and GluonCV look up."""
    names: Any = vars(np)  # which does not wake the warnings of NumPy's `__getattr__`
    for name, value in _REMOVED_VALUES.items():
        names.setdefault(name, value)
    for old, new in _RENAMED_FUNCTIONS.items():
        if old not in names:
            names[old] = names[new]
    names.setdefault("msort", _msort)
    for name in _FINANCIAL_FUNCTIONS:
        names.setdefault(name, _financial)
    if "_core" in names:  # NumPy 2 keeps `np.core` for the old names, and warns at every look: put the one there
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            core: Any = np.core
            vars(core)["numeric"] = core.numeric


@contextlib.contextmanager
def environment(name, value):
    """In here an environment variable has this value, or for None is not there."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = str(value)
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _num_threads():
    """``OMP_NUM_THREADS`` for the import, so that :func:`gluon_parallel.devices` can choose up to all cores later.

    MXNet's operators never use more than half of the cores, unless the variable is set when MXNet is loaded, and
    OpenMP's library with it. So it is, to the number that MXNet would take.
    """
    if "OMP_NUM_THREADS" in os.environ or "MXNET_OMP_MAX_THREADS" in os.environ or _is_loaded("libgomp.so.1"):
        return os.environ.get("OMP_NUM_THREADS")
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _is_loaded(library):
    try:
        ctypes.CDLL(library, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def serve():
    """Be the server or the scheduler that ``DMLC_ROLE`` asks for until all workers are done, and exit; else return.

    MXNet would do so in the middle of its own import, where an optimizer of this package that a worker sends could not
    be unpickled: the package would wait for that import. So it is called when everything is there.
    """
    mx.kvstore.kvstore_server._init_kvstore_server_module()


def _installed_version():
    """The version that MXNet's files say, without importing it (importing the wrong one may fail first)."""
    folder = mxnet_folder()
    if folder is None:
        raise MXNetUnavailable(f"MXNet is not installed in {sys.prefix}. Install it: {INSTALL}")
    try:
        text = (folder / "libinfo.py").read_text("utf-8")
    except OSError as error:
        raise MXNetUnavailable(f"The mxnet in {folder} is not whole: {error}. Reinstall it: {INSTALL}") from error
    found = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.MULTILINE)
    return found.group(1) if found else "of unknown version"


# Libraries of the system that MXNet's wheels ask for, and their packages in Debian.
_PACKAGES = {"libgomp": "libgomp1", "libquadmath": "libquadmath0", "libstdc++": "libstdc++6"}


def _explain(error):
    """The sentence for an `import mxnet` that failed although the shim was in place."""
    library = re.search(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file", str(error))
    if library is None:
        return f"MXNet {MXNET_VERSION} is installed in {sys.prefix} but does not import: {error}"
    name = library.group(1)
    base = name.partition(".so")[0]
    package = _PACKAGES.get(base)
    remedy = f": apt-get install {package} (Debian, Ubuntu), dnf install {base} (Fedora, RHEL)" if package else ""
    return f"MXNet needs the system library {name}, which is not here; install it{remedy}"


def import_mxnet():
    """Import MXNet 1.9.1 on this Python and NumPy, and return the module.

    Raises:
        MXNetUnavailable: says what is missing or in the way, and what to do.
    """
    if "mxnet" not in sys.modules and any(name.startswith("mxnet.") for name in sys.modules):
        raise MXNetUnavailable(
            "MXNet was imported before gluon_parallel in this process, and failed half-way. Start Python (or the "
            "kernel) again and write `import gluon_parallel` above the first `import mxnet`; a script that you cannot "
            "edit runs under `python -m gluon_parallel run script.py`"
        )
    mxnet = sys.modules.get("mxnet")
    is_there = mxnet is not None
    version = getattr(mxnet, "__version__", "of an unknown version") if is_there else _installed_version()
    if version != MXNET_VERSION:
        where = "was imported before gluon_parallel" if is_there else f"is installed in {sys.prefix}"
        raise MXNetUnavailable(
            f"MXNet {version} {where}; this package is made for and tested with {MXNET_VERSION}. Replace it: {INSTALL}"
        )
    restore_numpy_names()
    deferred.restore_distutils()
    folder = None if is_there else mxnet_folder()
    problems = [] if folder is None else prepare(folder)
    if problems:  # a build for GPUs would crash
        said = "; ".join(f"{text} Cure: {cure}" for text, cure in problems)
        raise MXNetUnavailable(f"MXNet's build for GPUs does not work here. {said}")
    try:
        with warnings.catch_warnings():
            # pkg_resources' farewell, and invalid escapes in docstrings that Python 3.12 points out
            warnings.simplefilter("ignore")
            functions = contextlib.nullcontext() if folder is None else operator_code.cached(folder)
            with deferred.for_mxnet(), functions:
                # Without a role, for a server would serve inside the import, see `serve`.
                with environment("DMLC_ROLE", None), environment("OMP_NUM_THREADS", _num_threads()):
                    mxnet = importlib.import_module("mxnet")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise MXNetUnavailable(_explain(error)) from error
    scalars.accept()
    numpy_protocol.convert()
    roi_align.install(mxnet)
    after_import.change_imports({**gluon_packages.changes(), **onnx_export.CHANGES})
    return mxnet


mx = import_mxnet()
