"""Train LeNet on several devices with MXNet's NumPy arrays (``mx.np``), in the form of today's d2l book.

    python scripts/train_lenet_np.py                                all GPUs, or two CPU devices; the embedded digits
    python scripts/train_lenet_np.py --devices cpu:4 --epochs 20
    python scripts/train_lenet_np.py --resume                       continue the newest run, bit for bit

The net, the loss and the update are written out; ``gp.split_and_load`` and ``gp.allreduce`` do what concerns several
devices. With Gluon, a net in NumPy mode trains like any other: see scripts/train_lenet.py.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, np, npx

DEFAULT = Path(__file__).resolve().parent.parent / "configs" / "lenet" / "scratch.yaml"
CHANNELS = (20, 50)  # of the two convolutions


@dataclasses.dataclass(frozen=True)
class Config(gp.config.TrainingConfig):
    scale: gp.config.PositiveFloat = gp.config.option("standard deviation of the initial weights")


def initial_weights(images, num_classes, scale):
    """The weights by name, on the host, for images of shape (N, channels, height, width)."""
    pixels = CHANNELS[1]
    for side in images.shape[2:]:
        pixels *= ((side - 2) // 2 - 4) // 2  # 28 -> 26 -> 13 -> 9 -> 4
    shapes = {
        "conv1": (CHANNELS[0], images.shape[1], 3, 3), "conv2": (CHANNELS[1], CHANNELS[0], 5, 5),
        "dense1": (pixels, 128), "dense2": (128, num_classes),
    }  # fmt: skip
    weights = {name: np.random.normal(scale=scale, size=shape) for name, shape in shapes.items()}
    biases = {"conv1": CHANNELS[0], "conv2": CHANNELS[1], "dense1": 128, "dense2": num_classes}
    return {**weights, **{f"{name}_bias": np.zeros(size) for name, size in biases.items()}}


def lenet(x, w):
    """Logits, (N, num_classes), of images, (N, channels, height, width), with the weights `w` of one device."""
    for name in ("conv1", "conv2"):
        weight = w[name]
        x = npx.convolution(x, weight, w[f"{name}_bias"], kernel=weight.shape[2:], num_filter=weight.shape[0])
        x = npx.pooling(npx.relu(x), pool_type="avg", kernel=(2, 2), stride=(2, 2))
    x = npx.relu(np.dot(npx.batch_flatten(x), w["dense1"]) + w["dense1_bias"])
    return np.dot(x, w["dense2"]) + w["dense2_bias"]


def cross_entropy(logits, labels):
    """The loss of each image, (N,)."""
    return -npx.pick(npx.log_softmax(logits), labels)


def copy_to(weights, device):
    """A copy of the weights on a device, each with memory for its gradient."""
    copies = {name: weight.copyto(device) for name, weight in weights.items()}
    for copy in copies.values():
        copy.attach_grad()
    return copies


def train_batch(images, labels, replicas, devices, lr):
    """One step of all devices together; returns the mean loss, which nobody has waited for yet."""
    shards = gp.split_and_load((images, labels), devices)  # at most one per device
    with autograd.record():
        losses = [cross_entropy(lenet(x, weights), y) for (x, y), weights in zip(shards, replicas)]
    autograd.backward(losses)
    for weights in replicas[len(shards) :]:  # a device without samples has a gradient of 0
        for weight in weights.values():
            weight.grad[:] = 0
    for name in replicas[0]:
        gp.allreduce([weights[name].grad for weights in replicas])
        for weights in replicas:
            weights[name][:] -= lr / len(labels) * weights[name].grad
    return sum(loss.sum().as_in_ctx(mx.cpu()) for loss in losses) / len(labels)


def main(config: Config, run: gp.Run) -> None:
    npx.set_np()
    devices = gp.devices(config.devices)
    data = gp.datasets.load(config.dataset, root=config.data_root)
    train = gp.datasets.batches(*data.train, config.batch_size, shuffle=True, seed=config.seed)
    test = gp.datasets.batches(*data.test, config.batch_size)

    weights = initial_weights(data.train.images, data.num_classes, config.scale)
    replicas = [copy_to(weights, device) for device in devices]

    def net(images):
        return lenet(images, replicas[devices.index(images.ctx)])

    saved = {name: [weights[name] for weights in replicas] for name in weights}
    loop = gp.Loop(train, seed=config.seed, run=run, saved=saved)
    print(f"{run.folder}: LeNet in mx.np on {config.dataset}, running on: {devices}")
    for _epoch in loop.epochs(config.epochs, config.patience):
        for images, labels in loop.loaders[0]:
            loop.add(train_batch(images, labels, replicas, devices, config.lr), len(labels))
        [(_, accuracy)] = gp.evaluate(net, test, "acc", devices)
        loop.end_epoch(score=accuracy, test_accuracy=accuracy)


if __name__ == "__main__":
    sys.exit(gp.start(main, Config, DEFAULT, description=__doc__))
