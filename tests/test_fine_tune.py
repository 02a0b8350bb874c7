"""docs/howto/fine_tune.md: a net with pretrained features, on pictures in folders, over devices and processes."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import needs_mpi

import gluon_parallel as gp
import mxnet as mx

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")

PAGE = (Path(__file__).resolve().parents[1] / "docs/howto/fine_tune.md").read_text("utf-8")
TRAIN, PREDICT = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
COLOURS = {"blue": (40, 60, 200), "green": (50, 180, 60)}
# Small pictures, few epochs, and no random augmentation: that is drawn on each process's own numbers.
SMALLER = {
    "epochs, size, weights = 5, 224,": "epochs, size, weights = 2, 32,",
    "transforms.Compose([transforms.RandomResizedCrop(size), transforms.RandomFlipLeftRight(), *normalise])":
    "transforms.Compose([transforms.Resize((size, size)), *normalise])",
    "batch_size=32": "batch_size=4", "num_workers=2": "num_workers=0",
    'devices = gp.devices("auto")': 'devices = gp.devices("auto"); mx.random.seed(3)',
}  # fmt: skip


def changed(code, changes):
    for old, new in changes.items():
        assert old in code, old
        code = code.replace(old, new)
    return code


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder with pictures of two colours, and with the weights of features."""
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.RandomState(3)
    for part, num in (("train", 6), ("test", 3)):
        for name, colour in COLOURS.items():
            (folder / "pictures" / part / name).mkdir(parents=True)
            for number in range(num):
                pixels = np.clip(random.normal(colour, 25, (48, 40, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / "pictures" / part / name / f"{number}.jpg")
    (folder / "new.jpg").write_bytes((folder / "pictures/test/green/0.jpg").read_bytes())
    net = gluoncv.model_zoo.get_model("resnet18_v1", classes=1000)
    mx.random.seed(5)
    net.initialize(mx.init.Xavier())
    net(mx.nd.zeros((1, 3, 32, 32)))
    net.features.save_parameters(str(folder / "resnet18_v1.params"))
    (folder / "fine_tune.py").write_text(changed(TRAIN, SMALLER))
    return folder


def run(folder, *words):
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_mpi
@pytest.mark.slow
def test_the_script_trains_the_same_weights_on_devices_and_processes_and_its_export_predicts(pictures):
    found = {}
    for name, words in {
        "devices": ["-m", "gluon_parallel", "run", "fine_tune.py"],
        "processes": ["-m", "gluon_parallel", "launch", "-n", "2", "--devices", "cpu:1", "fine_tune.py"],
    }.items():
        assert "best.npz" in run(pictures, *words)
        loaded = mx.nd.load(str(pictures / "pictures-0000.params"))
        found[name] = {key: value.asnumpy() for key, value in loaded.items()}
        (pictures / "runs/fine_tune").rename(pictures / f"runs/{name}")
    assert found["devices"].keys() == found["processes"].keys()
    for key, value in found["devices"].items():
        np.testing.assert_allclose(found["processes"][key], value, rtol=1e-3, atol=1e-4, err_msg=key)
    assert run(pictures, "-c", changed(PREDICT, {"size = 224": "size = 32"})) in ("0\n", "1\n")


def test_a_frozen_backbone_keeps_its_weights(pictures, monkeypatch, tmp_path):
    monkeypatch.chdir(pictures)
    code = changed(
        (pictures / "fine_tune.py").read_text(),
        {"if epoch == 0": "if epoch < 2", "runs/fine_tune": str(tmp_path), 'export("pictures")': 'export("frozen")'},
    )
    names = {}
    exec(code, names)
    before = mx.nd.load("resnet18_v1.params")
    for key, parameter in names["net"].features._collect_params_with_prefix().items():
        if "running" not in key:
            np.testing.assert_array_equal(parameter.data(gp.devices("auto")[0]).asnumpy(), before[key].asnumpy())
