"""GluonCV's functions compute on today's NumPy and SciPy what they did on NumPy 1.23."""

import builtins
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gluon_parallel as gp  # noqa: F401  (mends GluonCV)
from gluon_parallel.mxnet.compat import gluon_packages

ROOT = Path(__file__).resolve().parents[1]
pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")


def test_the_target_of_a_box_has_its_peak_where_the_box_has_its_center():
    from gluoncv.model_zoo.center_net.target_generator import CenterNetTargetGenerator

    boxes, kinds = np.array([[4, 6, 12, 10], [1, 1, 7, 5]], "float32"), np.array([[1], [0]], "float32")
    heat, sizes, *_ = (one.asnumpy() for one in CenterNetTargetGenerator(2, 16, 16)(boxes, kinds))
    peaks = [np.unravel_index(heat[kind].argmax(), (16, 16)) for kind in (1, 0)]
    assert [tuple(map(int, peak)) for peak in peaks] == [(8, 8), (3, 4)]  # row and column
    assert sizes[:, 8, 8].tolist() == [8, 4] and sizes[:, 3, 4].tolist() == [6, 4]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.filterwarnings("ignore:DetectionDataLoader is deprecated", "ignore::DeprecationWarning")
def test_labels_of_different_lengths_are_padded(num_workers):
    from gluoncv.data import DetectionDataLoader

    labels = [np.ones((rows, 5), "float32") for rows in (2, 1, 3)]
    data = [(np.full(3, number, "float32"), label) for number, label in enumerate(labels)]
    [(_, found)] = DetectionDataLoader(data, 3, num_workers=num_workers)
    expected = np.full((3, 3, 5), -1.0)
    for number, label in enumerate(labels):
        expected[number, : len(label)] = label
    np.testing.assert_array_equal(found.asnumpy(), expected)


def test_a_mask_fills_its_box_whether_fast_or_not():
    pytest.importorskip("pycocotools", reason="GluonCV's masks need pycocotools")
    from gluoncv.data.transforms import mask

    for fast in (True, False):
        found = mask.fill(np.ones((1, 28, 28), "float32"), np.array([[10, 20, 38, 48.0]]), (80, 60), fast_fill=fast)
        rows, columns = np.nonzero(found[0])
        near = [rows.min() - 20, rows.max() - 47, columns.min() - 10, columns.max() - 37]
        assert max(map(abs, near)) <= 1, (fast, near)  # pixels of the border are there or not


# ---- numbers and arrays ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [int, float])
def test_a_class_that_stands_for_a_number_is_one_and_takes_arrays_of_one_element(kind):
    ours = gluon_packages._standing_for(kind)
    for value in (np.array([2.0]), np.array([[2]]), np.float32(2), 2, "2"):
        assert type(ours(value)) is kind and ours(value) == 2
    with pytest.raises(TypeError):
        ours(np.ones(2))
    assert isinstance(kind(3), ours) and not isinstance("3", ours) and issubclass(kind, ours)
    assert ours == kind and kind == ours and ours in (str, kind) and len({ours, kind}) == 1
    assert np.dtype(ours) == np.dtype(kind) == np.zeros(1, ours).dtype == np.ones(1, "float32").astype(ours).dtype
    assert ours() == 0 and kind is not int or ours("11", 2) == 3


def test_other_modules_have_their_own_numpy_and_numbers():
    names: dict = {}
    exec("from gluoncv.data.transforms.pose import *", names)
    assert names["__builtins__"] in (builtins, vars(builtins)) and not {"int", "float"} & {*names}
    assert int is builtins.int and np is sys.modules["numpy"]


# ---- SciPy's interp2d -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "degree"), [("linear", 1), ("cubic", 3), ("quintic", 5)])
@pytest.mark.parametrize("fill_value", [None, -7.0])
def test_a_polynomial_is_interpolated_exactly_inside_of_the_grid_and_filled_or_continued_outside(
    kind, degree, fill_value
):
    def polynomial(x, y):
        return 1 + 2 * x**degree - 3 * y**degree + 0.5 * x * y

    x, y = np.array([0, 1, 1.5, 2, 4, 5, 6, 7]), np.array([3, -1, 0, 1, 2, 5, 4])  # y in any order
    z = polynomial(x[None], y[:, None])
    at_x, at_y = np.array([6.5, 0.25, 3]), np.array([-0.5, 4.5])
    found = gluon_packages.interp2d(x, y, z, kind=kind, fill_value=fill_value)
    expected = polynomial(np.sort(at_x)[None], at_y[:, None])
    np.testing.assert_allclose(found(at_x, at_y), expected, rtol=1e-9, atol=1e-6 * abs(z).max())  # float64
    outside = found([-1, 3], [3, 9])
    edge = polynomial(np.array([[0, 3]]), np.array([[3], [5]]))
    expected = edge if fill_value is None else [[-7.0, edge[0, 1]], [-7.0, -7.0]]
    np.testing.assert_allclose(outside, expected, rtol=1e-9, atol=1e-6 * abs(z).max())
    assert found([1, 2], 0).shape == (2,)


def test_what_scipys_interp2d_refused_is_refused():
    with pytest.raises(ValueError, match="expected one of linear, cubic, quintic"):
        gluon_packages.interp2d([0, 1], [0, 1], np.zeros((2, 2)), kind="nearest")
    with pytest.raises(ValueError, match=r"expected \(3, 2\) for a grid"):
        gluon_packages.interp2d([0, 1], [0, 1, 2], np.zeros((2, 3)))
    with pytest.raises(ValueError, match="outside of the grid"):
        gluon_packages.interp2d([0, 1], [0, 1], np.zeros((2, 2)), bounds_error=True)([2], [0])


def test_scipy_has_the_class_whether_it_was_imported_before_or_after():
    for code in ("import scipy.interpolate, gluon_parallel", "import gluon_parallel, scipy.interpolate"):
        code += "; print(scipy.interpolate.interp2d([0, 1], [0, 1], [[0, 1], [1, 2]])(0.5, 0.5))"
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
        assert done.stdout == "[1.]\n", done.stderr


# ---- all of it ------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # it runs some 150 functions of GluonCV
def test_no_loss_transform_layer_metric_or_loader_of_gluoncv_fails():
    groups = "losses presets transforms layers metrics data gluonnlp".split()
    script = ROOT / "scripts" / "studies" / "gluoncv_functions.py"
    done = subprocess.run([sys.executable, script, "--only", *groups], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failed" in done.stdout
