"""GluonCV's own loops and Gluon's Estimator train with our pieces: on two devices, and on two processes alike."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import needs_mpi
from script_files import load

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import launch as launching

pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")
PATH = Path(__file__).resolve().parents[1] / "scripts" / "gluoncv_with_gluon_parallel.py"


SCRIPT = load("gluoncv_with_gluon_parallel")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """A folder for the scenes, written once."""
    return tmp_path_factory.mktemp("scenes")


def results(text):
    """{loop: (pixel accuracy, mIoU)} as the script prints them."""
    found = re.findall(r"(\w+): pixel accuracy (\S+), mIoU (\S+)", text)
    return {loop: (float(accuracy), float(miou)) for loop, accuracy, miou in found}


def arguments(scenes, num_train=12, epochs=2):
    return ["--data_root", str(scenes), "--num_train", str(num_train), "--epochs", str(epochs)]


@pytest.fixture
def on_two_devices(scenes, monkeypatch, capsys):
    words = ["--devices", "cpu:2", *arguments(scenes)]
    monkeypatch.setattr(sys, "argv", [str(PATH), *words])
    SCRIPT.main()
    return results(capsys.readouterr().out)


@pytest.mark.slow
@needs_mpi
def test_all_loops_train_on_two_devices_and_two_processes_over_mpi_say_the_same(on_two_devices, scenes, tmp_path):
    assert list(on_two_devices) == ["segmentation", "parallel", "estimator"]
    assert on_two_devices["segmentation"] == on_two_devices["parallel"]  # two ways to write one thing
    result = launching.launch(PATH, arguments(scenes), 2, "mpi", "cpu:1", timeout=60.0, logs=str(tmp_path / "logs"))
    log = (tmp_path / "logs" / "rank-0.log").read_text()
    assert result.exit_code == 0, log
    got = results(log)
    assert got.keys() == on_two_devices.keys()
    for loop, wanted in on_two_devices.items():
        # 4 steps carry the rounding of float32 sums further; 98,304 pixels, some near the border of two classes
        assert got[loop] == pytest.approx(wanted, abs=5e-3), loop


def weights(name, devices, data):
    """What one epoch of a loop makes of the net, on the last device."""
    gp.reseed(0)
    store = mx.kv.create("device")
    net = SCRIPT.make_net("small", SCRIPT.NUM_CLASSES, devices, store)
    SCRIPT.LOOPS[name](net, SCRIPT.make_trainer(net, store, 10), devices).train(data, epochs=1)
    return [parameter.data(devices[-1]).asnumpy() for parameter in net.collect_params().values()]


def test_the_estimator_on_two_devices_does_what_it_does_on_one(scenes):
    data, _ = SCRIPT.read(str(scenes), mx.kv.create("device"), 12)
    wanted = weights("estimator", [mx.cpu(0)], list_as_loader(data))
    got = weights("estimator", [mx.cpu(0), mx.cpu(1)], list_as_loader(data))
    for one, two in zip(wanted, got):
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)  # float32 sums in another order, two steps


def list_as_loader(data):
    """A loader with the same batches in every pass, the second one uneven on two devices."""
    sampler = [list(range(6)), list(range(6, 11))]
    return mx.gluon.data.DataLoader(data._dataset, batch_sampler=sampler)
