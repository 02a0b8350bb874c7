"""MXNet 1.9.1 imports and runs on this Python and NumPy, and on the others that this machine has."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import numpy as np
import pytest
from interpreters import interpreter

import mxnet as mx
from gluon_parallel.errors import MXNetUnavailable
from gluon_parallel.mxnet import compat

ROOT = Path(__file__).resolve().parents[1]
SITE_PACKAGES = Path(sysconfig.get_path("purelib"))

needs_gluoncv = pytest.mark.skipif(importlib.util.find_spec("gluoncv") is None, reason="GluonCV is not installed here")


def python(code, *flags, **environment):
    """Run `code` in a Python of its own; the finished process, with its output as text."""
    return subprocess.run(
        [sys.executable, *flags, "-c", textwrap.dedent(code)], env={**os.environ, **environment}, cwd="/", timeout=120,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip


def said_by(code, *flags, **environment):
    """What a Python of its own prints that runs `code` and succeeds."""
    done = python(code, *flags, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def other_site(tmp_path):
    """A function that mirrors this Python's site-packages in links, without some names; tells how to use the mirror."""

    def mirror(*without):
        folder = tmp_path / "site-packages"
        folder.mkdir()
        for entry in SITE_PACKAGES.iterdir():
            if entry.suffix != ".pth" and not any(entry.name.startswith(name) for name in without):
                (folder / entry.name).symlink_to(entry)
        return folder, {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}

    return mirror


# ---- it works -------------------------------------------------------------------------------------------------------


def test_after_import_gluon_parallel_a_plain_import_mxnet_trains_one_step_as_numpy_does(rng):
    x, w, y = rng.normal(size=(5, 3)), rng.normal(size=(2, 3)), rng.normal(size=(5, 2))
    net = mx.gluon.nn.Dense(2, use_bias=False, in_units=3)
    net.initialize()
    net.weight.set_data(mx.nd.array(w))
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with mx.autograd.record():
        loss = mx.gluon.loss.L2Loss()(net(mx.nd.array(x)), mx.nd.array(y))
    loss.backward()
    trainer.step(len(x))
    # L2Loss halves the square and takes the mean over each sample's two outputs.
    expected = w - 0.1 * ((x @ w.T - y) / 2).T @ x / len(x)
    np.testing.assert_allclose(net.weight.data().asnumpy(), expected, rtol=1e-5, atol=1e-6)  # float32 against float64


@needs_gluoncv
def test_gluoncv_imports_and_one_of_its_nets_runs():
    code = """
        import gluon_parallel, gluoncv, mxnet as mx
        net = gluoncv.model_zoo.get_model("cifar_resnet20_v1", classes=7)
        net.initialize()
        print(net(mx.nd.ones((2, 3, 32, 32))).shape)
        """
    assert said_by(code) == "(2, 7)\n"


# ---- and takes nothing away -----------------------------------------------------------------------------------------


def test_what_mxnet_rarely_needs_is_imported_when_it_is_used():
    said_by(
        """
        import sys, gluon_parallel, mxnet as mx
        rare = "scipy.stats scipy.sparse sklearn requests setuptools distutils cv2 mxnet.test_utils mxnet.onnx".split()
        assert not {*rare, "mxnet.contrib.onnx"} & {*sys.modules}
        mx.nd.array([1.0])
        assert "scipy.sparse" not in sys.modules
        assert mx.test_utils.ss.norm.cdf(0) == 0.5 and "scipy.stats" in sys.modules
        import scipy.stats
        assert mx.test_utils.ss.norm is scipy.stats.norm is mx.contrib.quantization.stats.norm
        import requests
        assert mx.gluon.utils.requests.get is requests.get
        assert mx.test_utils.default_context() == mx.cpu()
        assert mx.onnx.export_model is mx.contrib.onnx.export_model_
        from mxnet.test_utils import assert_almost_equal
        assert mx.test_utils.assert_almost_equal is assert_almost_equal
        assert mx.image.image.cv2.IMREAD_COLOR == mx.recordio.cv2.IMREAD_COLOR == 1
        """
    )


def test_the_shim_replaces_no_name_that_numpy_has():
    said = said_by(
        """
        import warnings, numpy as np
        warnings.simplefilter("ignore")
        before = dict(vars(np))
        renamed = "bool int float object PZERO NZERO PINF NINF Inf NaN NAN alltrue sometrue product cumproduct in1d " \\
            "trapz round_ row_stack msort".split()
        lazy = {name: getattr(np, name) for name in renamed if name not in before and hasattr(np, name)}
        import gluon_parallel, mxnet
        changed = [name for name, value in before.items() if vars(np).get(name) is not value]
        changed += [name for name, value in lazy.items() if getattr(np, name) is not value]
        print(changed)
        """
    )
    assert said == "[]\n"


OLD_NAMES = {
    "np.alltrue([1, 0])": False, "np.sometrue([1, 0])": True, "np.product([2, 3])": 6,
    "np.cumproduct([2, 3]).tolist()": [2, 6], "np.msort([[3, 1], [0, 2]]).tolist()": [[0, 1], [3, 2]],
    "np.in1d([1, 5], [5]).tolist()": [False, True], "np.trapz([1.0, 2.0])": 1.5,
    "np.row_stack([[1], [2]]).tolist()": [[1], [2]],
    "(np.PINF, np.NINF, np.PZERO, np.Inf)": (np.inf, -np.inf, 0.0, np.inf),
    "np.array([1.7]).astype(np.int).tolist()": [1], "np.array([0, 2]).astype(np.bool).dtype.str": "|b1",
    "np.dtype(np.float).str, np.dtype(np.object).str": ("<f8", "|O"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tests", "ignore:.*deprecated:DeprecationWarning")
def test_a_name_does_what_it_did_before_numpy_removed_it():
    for expression, value in OLD_NAMES.items():
        assert eval(expression, {"np": np}) == value, expression
    with pytest.raises(NotImplementedError, match="numpy-financial"):
        np.npv(0.1, [1.0])


def test_an_import_changes_no_file_of_the_installation_and_warns_of_nothing():
    def state():
        return {
            path: (status.st_size, status.st_mtime_ns)
            for folder, _, files in os.walk(SITE_PACKAGES)
            if not folder.endswith("__pycache__")
            for path in (os.path.join(folder, file) for file in files)
            for status in [os.stat(path)]
        }

    before = state()
    code = "import gluon_parallel, mxnet as mx; print(mx.nd.ones(3).sum().asscalar())"
    assert said_by(code, "-W", "error") == "3.0\n"
    assert state() == before


# ---- or says what to do ---------------------------------------------------------------------------------------------


def error_of(code="import gluon_parallel", *flags, **environment):
    """The one line in which a process that runs `code`, and fails, names its MXNetUnavailable."""
    done = python(code, *flags, **environment)
    assert done.returncode == 1, done.stdout + done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("gluon_parallel.errors.MXNetUnavailable: "), done.stderr
    return last


def test_an_import_of_mxnet_that_failed_earlier_is_explained():
    message = error_of(
        """
        import numpy
        vars(numpy).pop("PZERO", None)  # so that it fails on an old NumPy too
        try:
            import mxnet
        except Exception:
            pass
        import gluon_parallel
        """
    )
    assert "above the first `import mxnet`" in message
    assert "python -m gluon_parallel run" in message


@pytest.fixture
def fake_mxnet(tmp_path):
    """A function that writes a package `mxnet` of another version; returns how a process finds it first."""

    def write(version, **files):
        folder = tmp_path / "fake" / "mxnet"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(f'__version__ = "{version}"\n')
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        return {"PYTHONPATH": f"{folder.parent}{os.pathsep}{ROOT}"}

    return write


@pytest.mark.parametrize(
    ("version", "files", "code", "words"),
    [
        ("2.0.0", {"libinfo": '__version__ = "2.0.0"\n'}, "import gluon_parallel", "MXNet 2.0.0 is installed in"),
        ("1.8.0", {}, "import mxnet, gluon_parallel", "MXNet 1.8.0 was imported before gluon_parallel"),
        ("1.9.1", {}, "import gluon_parallel", "is not whole"),
    ],
)
def test_another_version_of_mxnet_or_half_of_one_is_refused(fake_mxnet, version, files, code, words):
    message = error_of(code, **fake_mxnet(version, **files))
    assert words in message and "pip install --no-deps 'mxnet==1.9.1'" in message


def test_an_installation_without_mxnet_is_told_how_to_get_it(other_site):
    message = error_of("import gluon_parallel", "-S", **other_site("mxnet")[1])
    assert "MXNet is not installed" in message
    assert "pip install --no-deps 'mxnet==1.9.1'" in message


@pytest.mark.parametrize(
    ("library", "remedy"),
    [
        ("libgomp.so.1", "apt-get install libgomp1"),
        ("libquadmath.so.0", "apt-get install libquadmath0 (Debian, Ubuntu), dnf install libquadmath"),
        ("libother.so.7", "not here; install it"),
    ],
)
def test_every_library_that_can_be_missing_has_its_remedy(library, remedy, monkeypatch):
    def fail(_name):
        raise OSError(f"{library}: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(compat.importlib, "import_module", fail)
    with pytest.raises(MXNetUnavailable, match=re.escape(library)) as raised:
        compat.import_mxnet()
    assert remedy in str(raised.value)


def test_a_python_without_distutils_and_setuptools_imports_mxnet_and_says_what_gluoncv_needs(other_site):
    _, environment = other_site("setuptools", "_distutils_hack", "distutils")
    done = python(
        "import gluon_parallel, mxnet; print(mxnet.__version__); import distutils.version", "-S", **environment
    )
    assert done.stdout == "1.9.1\n"
    if sys.version_info < (3, 12):
        assert done.returncode == 0, done.stderr
    else:
        assert "pip install 'setuptools<85'" in done.stderr.splitlines()[-1]


# ---- on the other interpreters --------------------------------------------------------------------------------------

# Each Python; the NumPy of its time for the oldest, and the last 1.x for the first Python without distutils.
NUMPYS = {9: "1.23.5", 10: None, 11: None, 12: "1.26.4", 13: None}
OTHERS = [
    pytest.param(minor, numpy, marks=[pytest.mark.exhaustive] if minor in (10, 12) else [])  # near to others
    for minor, numpy in NUMPYS.items()
    if numpy or minor != sys.version_info[1]
]


@pytest.mark.slow
@pytest.mark.parametrize(("minor", "numpy"), OTHERS)
def test_this_file_and_the_command_line_pass_on_another_python_and_numpy(minor, numpy, tmp_path):
    other = interpreter(minor)
    if other is None:
        pytest.skip(f"this machine has no Python 3.{minor}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment.update(PYTHON=other, VENV=str(tmp_path / "venv"))
    if numpy is not None:
        # The ranges of setup.py, from which the installer chooses what goes with that NumPy.
        requires = [line.partition(";") for line in importlib.metadata.requires("gluon-parallel")]
        ranges = [package for package, _, extra in requires if not extra or '"all"' in extra or '"test"' in extra]
        (tmp_path / "requirements.txt").write_text("\n".join([*ranges, f"numpy=={numpy}"]))
        environment["REQUIREMENTS"] = str(tmp_path / "requirements.txt")
    try:  # the first time, half a gigabyte is fetched
        subprocess.run(["sh", "scripts/make_venv.sh"], cwd=ROOT, env=environment, timeout=1800, check=True)
        subprocess.run(
            [tmp_path / "venv/bin/python", "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider",
             "tests/test_compat.py", "tests/test_cli.py"],
            cwd=ROOT, env=environment, timeout=1500, check=True,
        )  # fmt: skip
        if numpy is not None:
            version = [tmp_path / "venv/bin/python", "-c", "import gluon_parallel, numpy; print(numpy.__version__)"]
            assert subprocess.check_output(version, text=True, cwd="/").strip() == numpy
    finally:
        shutil.rmtree(tmp_path / "venv", ignore_errors=True)  # a gigabyte that pytest would keep for three sessions
