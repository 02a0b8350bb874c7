"""The LeNet scripts train, stop, continue and fail as they say; and step by step they do the same."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from script_files import (
    assert_refused,
    assert_same_run,
    draw_only_for,
    interrupt_at,
    load,
    load_few_digits,
    rates_of,
    rows,
)  # fmt: skip

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIGS = REPOSITORY / "configs" / "lenet"


CONCISE, SCRATCH, NUMPY = load("train_lenet"), load("train_lenet_scratch"), load("train_lenet_np")
SCRIPTS = pytest.mark.parametrize("script", [CONCISE, SCRATCH, NUMPY], ids=["gluon", "scratch", "np"])
SMOKE = {
    CONCISE: CONFIGS / "smoke.yaml",
    SCRATCH: CONFIGS / "scratch_smoke.yaml",
    NUMPY: CONFIGS / "scratch_smoke.yaml",
}


@pytest.fixture(autouse=True)
def _runs_go_to_a_folder_of_their_own(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw_only_for(request, monkeypatch)
    yield
    mx.npx.reset_np()  # which one of the scripts has set


@pytest.fixture
def few_images(monkeypatch):
    """The data set is the first 100 digits, so that an epoch takes no time."""
    load_few_digits(monkeypatch)


def run(script, *argv):
    return gp.start(script.main, script.Config, script.DEFAULT, ["--config", str(SMOKE[script]), *argv])


NAMES = ("conv1", "conv1_bias", "conv2", "conv2_bias", "dense1", "dense1_bias", "dense2", "dense2_bias")


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_the_three_scripts_agree_step_by_step_from_the_same_weights(rng, num_devices):
    devices, lr = [mx.cpu(i) for i in range(num_devices)], 0.2
    params = SCRATCH.init_params(1, 28, 28, 10, scale=0.1)
    device_params = [SCRATCH.get_params(params, device) for device in devices]
    net = gp.models.LeNet()
    net.initialize(ctx=devices)
    net.hybridize()
    gluons = list(net.collect_params().values())
    for i, (param, value) in enumerate(zip(gluons, params)):
        param.set_data(value.T if i in (4, 6) else value)  # Gluon's Dense keeps its weight as (out, in)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr})
    step = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer)
    mx.npx.set_np()
    weights = {name: mx.np.array(param.asnumpy()) for name, param in zip(NAMES, params)}
    replicas = [NUMPY.copy_to(weights, device) for device in devices]

    for batch_size in (8, 7, 5, 2, 1, 6):  # unequal shards, and devices that get none
        images = rng.uniform(size=(batch_size, 1, 28, 28)).astype("float32")
        labels = rng.integers(10, size=batch_size).astype("int32")
        mx.npx.set_np()
        found = NUMPY.train_batch(images, labels, replicas, devices, lr).asnumpy()
        mx.npx.reset_np()
        loss = SCRATCH.train_batch(images, labels, device_params, devices, lr).asnumpy()
        # float32 sums of up to 800 products in another order
        np.testing.assert_allclose(step(images, labels).asnumpy(), loss, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found, loss[0], rtol=1e-5)
        for i, (name, param) in enumerate(zip(NAMES, gluons)):
            for device, copies, arrays in zip(devices, device_params, replicas):
                value = copies[i].asnumpy()
                got = param.data(device).asnumpy()
                np.testing.assert_allclose(got, value.T if i in (4, 6) else value, rtol=1e-4, atol=1e-6)
                np.testing.assert_allclose(arrays[name].asnumpy(), value, rtol=1e-4, atol=1e-6)


def test_the_learning_rate_falls_along_half_a_cosine_also_in_a_run_that_is_resumed(few_images, monkeypatch):
    rates = rates_of(monkeypatch)
    wanted = [0.2 * (1 + math.cos(math.pi * epoch / 4)) / 2 for epoch in range(4)]
    assert run(CONCISE, "--epochs", "4", "--lr", "0.2", "--output", "whole") == 0
    np.testing.assert_allclose(rates, wanted, rtol=1e-12)
    gp.Run(Path("whole/1")).checkpoints()[-1].unlink()
    rates.clear()
    assert run(CONCISE, "--output", "whole", "--resume") == 0
    np.testing.assert_allclose(rates, wanted[3:], rtol=1e-12)


@SCRIPTS
def test_a_script_prints_a_table_and_where_the_checkpoint_and_the_picture_are(script, few_images, pictures, capsys):
    assert run(script) == 0
    out = capsys.readouterr().out
    assert "[cpu(0), cpu(1)]" in out and "test acc" in out
    assert re.search(r"^ +1 .*%", out, re.M) and re.search(r"^ +2 .*%", out, re.M)
    paths = re.findall(r"^(?:checkpoint|curves): +(.+)$", out, re.M)
    assert len(paths) == 2 and all(Path(path).stat().st_size > 1000 for path in paths)
    folder = Path(paths[0]).parent
    assert folder == Path("runs") / "lenet" / SMOKE[script].stem / "1"
    assert [row["epoch"] for row in rows(folder)] == [1, 2]


@SCRIPTS
def test_a_script_that_is_interrupted_and_resumed_ends_with_the_same_bits(script, few_images, monkeypatch, capsys):
    options = ["--epochs", "3", "--batch_size", "16", "--seed", "5"]
    assert run(script, "--output", "whole", *options) == 0

    # What a script calls in each of its 7 steps per epoch.
    owner, name = (gp.DataParallel, "step") if script is CONCISE else (gp, "split_and_load")
    interrupt_at(11, monkeypatch, owner, name)
    assert run(script, "--output", "parts", *options) == 130
    assert "Continue with --resume" in capsys.readouterr().err
    assert [path.name for path in gp.Run(Path("parts/1")).checkpoints()][-1].startswith("epoch-0001-step-0000")
    assert run(script, "--output", "parts", "--resume") == 0
    whole, parts = assert_same_run("whole/1", "parts/1")
    assert whole == parts


@SCRIPTS
def test_coloured_images_of_another_size_train_as_well(script, monkeypatch, rng):
    def part(number):
        return gp.datasets.Part(rng.uniform(size=(number, 3, 32, 32)).astype("float32"), np.arange(number) % 10)

    images = gp.datasets.Dataset("cifar10", part(20), part(10), tuple("0123456789"))
    monkeypatch.setattr(gp.datasets, "load", lambda name, root=None: images)
    assert run(script, "--dataset", "cifar10", "--epochs", "1") == 0


@SCRIPTS
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset", "digit"], r"no data set 'digit'.*'digits'.*'fashion_mnist'"),
        (["--devices", "gpu@97"], r"gpu\(97\)"),
        (["--devices", "tpu"], r"cannot read 'tpu'"),
        (["--epoch", "3"], r"no flag --epoch. Did you mean --epochs\?"),
        (["--lr", "1e25"], r"epoch 1, step \d+: the loss is (nan|inf).*smaller learning rate"),
        (["--resume", "nowhere"], r"no run with a checkpoint in nowhere"),
    ],
)
def test_a_script_refuses_what_cannot_work_in_one_message(script, argv, message, capsys):
    assert_refused(run(script, *argv), capsys, message)


def command(script, *argv):
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for name in ("MXNET_CPU_TEMP_COPY", "OMP_NUM_THREADS"):  # what this test session needs is not what a script gets
        environment.pop(name, None)
    return [sys.executable, str(Path(script.__file__)), *argv], environment


@pytest.mark.slow
@pytest.mark.parametrize(("script", "name", "least"), [(CONCISE, "default", 0.97), (SCRATCH, "scratch", 0.9)])
def test_the_default_config_learns_the_digits(script, name, least):
    words, environment = command(script, "--devices", "cpu:2")
    subprocess.run(words, env=environment, check=True, timeout=1500)
    assert rows(f"runs/lenet/{name}/1")[-1]["test_accuracy"] >= least
