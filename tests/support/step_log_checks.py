"""A training with a log of its steps, metrics and functions of its own: ``step_log_checks.py DEVICES FOLDER``."""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

NUM, BATCH = 22, 4  # steps of four samples and, at the end of an epoch, one of two
EVERY, LARGEST = 5, 0.05
METRICS = ["acc", "f1", "mse"]


def data():
    random = np.random.RandomState(3)
    return random.standard_normal((NUM, 3)), random.randint(0, 2, NUM).astype("float64"), random.standard_normal((2, 3))


def train(folder, devices, num_epochs=2, stop=None, prepared=None):
    """Train; returns the training. `stop`: the number of the step after which process 0 is asked to stop."""
    images, labels, weight = data()
    net = gluon.nn.Dense(2, in_units=3, use_bias=False)
    net.cast("float64")
    net.initialize(ctx=devices)
    net.weight.set_data(nd.array(weight, dtype="float64"))
    schedule = mx.lr_scheduler.FactorScheduler(2, 0.9, base_lr=0.5)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"lr_scheduler": schedule})
    dataset = gluon.data.ArrayDataset(nd.array(images, dtype="float64"), nd.array(labels, dtype="float64"))
    training, loader = gp.prepare(
        net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, gluon.data.DataLoader(dataset, BATCH),
        clip_global_norm=LARGEST, run=gp.Run(folder, log_every=EVERY, csv=True), train_metrics=METRICS,
    )  # fmt: skip
    if prepared is not None:
        prepared(training)

    @training.on_step
    def log_norm(training):
        if training.num_steps % 4 == 0:
            training.log(weight_norm=net.weight.data(devices[0]).norm(), fours=training.num_steps // 4)
        if training.num_steps == stop and training.is_main:
            signal.raise_signal(signal.SIGTERM)

    for _ in training.epochs(num_epochs):
        for x, y in loader:
            training.step(x, y)
    return training


def rows(folder):
    """The rows of steps and of epochs of a run's log, without how long they took."""
    told = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    for row in told:
        row.pop("samples_per_second", None)
    return [row for row in told if "step" in row], [row for row in told if "step" not in row]


def main():
    devices = gp.devices(sys.argv[1])
    folder = Path(sys.argv[2])
    train(folder / "whole", devices)
    try:
        train(folder / "parts", devices, stop=9)
    except SystemExit:
        pass
    else:
        raise AssertionError("it has gone on")
    train(folder / "parts", devices)
    print(f"passed on {os.environ.get('OMPI_COMM_WORLD_RANK', '0')}", flush=True)


if __name__ == "__main__":
    main()
