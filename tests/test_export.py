"""docs/howto/export.md: predictions of a checkpoint on two devices, and of an exported net without this package."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx

PAGE = Path(__file__).resolve().parents[1] / "docs" / "howto" / "export.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
PREDICT, EXPORT, ONNX, RUNTIME, USE = BLOCKS
MODULE = """
symbol, arguments, statistics = mx.model.load_checkpoint("digits", 0)
module = mx.mod.Module(symbol, label_names=None, context=mx.cpu())
module.bind([("data", images.shape)], for_training=False)
module.set_params(arguments, statistics)
module.forward(mx.io.DataBatch([images]), is_train=False)
scores = module.get_outputs()[0]
"""
# What a newer NumPy has removed and MXNet looks up at its import; functions among it are not called.
NAMES = """
import numpy

numbers = {"PZERO": 0.0, "NZERO": -0.0, "PINF": float("inf"), "NINF": -float("inf"), "Inf": float("inf")}
numbers.update(NaN=float("nan"), NAN=float("nan"), bool=bool)
functions = "alltrue sometrue product in1d trapz round_ msort mirr npv pmt ppmt pv rate"
for name, value in {**numbers, **dict.fromkeys(functions.split())}.items():
    vars(numpy).setdefault(name, value)
"""
IMAGES = 'numpy.random.RandomState(3).rand(5, 1, 28, 28).astype("float32")'
WITHOUT = "import sys\nsys.modules['gluon_parallel'] = None  # its import fails\n"
ZEROS = "mx.nd.zeros((5, 1, 28, 28))"
NUMPY_ZEROS = 'np.zeros((5, 1, 28, 28), "float32")'


def run(lines, folder):
    done = subprocess.run([sys.executable, "-c", lines], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_outputs_of_all_devices_are_in_the_order_of_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net, (images, labels) = gp.models.LeNet(num_classes=10), gp.datasets.load("digits").test
    net.initialize(mx.init.Xavier())
    gp.checkpoint.save("runs/lenet/default/1/best.npz", net)
    names = {}
    exec(compile(PREDICT, "page", "exec"), names)
    wanted = net(mx.nd.array(images)).asnumpy()
    np.testing.assert_allclose(names["scores"], wanted, rtol=1e-5, atol=1e-6)  # float32 sums of other batches
    assert names["accuracy"] == [("accuracy", np.mean(wanted.argmax(axis=1) == labels))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the page has exported its net, with the outputs that the net has on both devices."""
    folder = tmp_path_factory.mktemp("export")
    after = f"""
import numpy
images = {IMAGES}
statistics = net[1].running_var.list_data()
assert (statistics[0].asnumpy() == statistics[1].asnumpy()).all() and (statistics[0].asnumpy() != 1).all()
numpy.save("wanted.npy", net(mx.nd.array(images, ctx=mx.cpu(1))).asnumpy())
"""
    run(EXPORT + after, folder)
    return folder


def test_the_exported_net_gives_the_same_outputs_with_mxnet_alone(folder):
    assert ZEROS in USE
    use = USE.replace(ZEROS, f"mx.nd.array({IMAGES})")
    save = "\nnumpy.save('symbol_block.npy', net(images).asnumpy()); numpy.save('module.npy', scores.asnumpy())"
    save += "\nnumpy.save('classes.npy', classes.asnumpy())\nassert sys.modules['gluon_parallel'] is None"
    run(WITHOUT + NAMES + use + MODULE + save, folder)
    wanted = np.load(folder / "wanted.npy")
    for name in ("symbol_block", "module"):  # float32 sums in another order
        np.testing.assert_allclose(np.load(folder / f"{name}.npy"), wanted, rtol=1e-4, atol=1e-5)
    assert np.load(folder / "classes.npy").tolist() == wanted.argmax(axis=1).tolist()


def test_the_file_of_onnx_gives_the_same_outputs_without_mxnet(folder):
    run(ONNX, folder)
    assert NUMPY_ZEROS in RUNTIME
    use = RUNTIME.replace(NUMPY_ZEROS, IMAGES.replace("numpy.", "np."))
    run("import sys\nsys.modules['mxnet'] = None\n" + use + "\nnp.save('onnx.npy', scores)", folder)
    np.testing.assert_allclose(np.load(folder / "onnx.npy"), np.load(folder / "wanted.npy"), rtol=1e-4, atol=1e-5)
