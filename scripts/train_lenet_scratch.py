"""Train LeNet on several devices from scratch: no Gluon net, no trainer, only arrays, gradients and an allreduce.

    python scripts/train_lenet_scratch.py                           all GPUs, or two CPU devices; the embedded digits
    python scripts/train_lenet_scratch.py --dataset fashion_mnist --epochs 20 --devices cpu:4
    python scripts/train_lenet_scratch.py --resume                  continue the newest run, bit for bit

scripts/train_lenet.py does the same with Gluon; scripts/train_lenet_np.py with MXNet's NumPy arrays.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, nd

DEFAULT = Path(__file__).resolve().parent.parent / "configs" / "lenet" / "scratch.yaml"
NAMES = ("w1", "b1", "w2", "b2", "w3", "b3", "w4", "b4")


@dataclasses.dataclass(frozen=True)
class Config(gp.config.TrainingConfig):
    scale: gp.config.PositiveFloat = gp.config.option("standard deviation of the initial weights")


def init_params(channels, height, width, num_classes, scale):
    """The net: two convolutions and two dense layers, as eight arrays on the host."""
    last = 50 * (((height - 2) // 2 - 4) // 2) * (((width - 2) // 2 - 4) // 2)  # 800 for 28 x 28 pixels
    shapes = {"w1": (20, channels, 3, 3), "w2": (50, 20, 5, 5), "w3": (last, 128), "w4": (128, num_classes)}
    params = []
    for layer in "1234":
        weight = nd.random.normal(scale=scale, shape=shapes["w" + layer])
        params += [weight, nd.zeros(20 if layer == "1" else 50 if layer == "2" else weight.shape[1])]
    return params


def lenet(images, params):
    """Logits, (N, num_classes), of images, (N, channels, height, width)."""
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    h1 = nd.relu(nd.Convolution(images, w1, b1, kernel=w1.shape[2:], num_filter=w1.shape[0]))
    p1 = nd.Pooling(h1, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h2 = nd.relu(nd.Convolution(p1, w2, b2, kernel=w2.shape[2:], num_filter=w2.shape[0]))
    p2 = nd.Pooling(h2, pool_type="avg", kernel=(2, 2), stride=(2, 2))
    h3 = nd.relu(nd.dot(nd.flatten(p2), w3) + b3)
    return nd.dot(h3, w4) + b4


def softmax_cross_entropy(logits, labels):
    """The loss of each image, (N,)."""
    return -nd.pick(nd.log_softmax(logits), labels)


def compute_loss(images, labels, params):
    return softmax_cross_entropy(lenet(images, params), labels)


def get_params(params, device):
    """A copy of the parameters on a device, each with memory for its gradient."""
    copies = [param.copyto(device) for param in params]
    for copy in copies:
        copy.attach_grad()
    return copies


def sgd(params, lr, batch_size):
    for param in params:
        param[:] -= lr / batch_size * param.grad


def train_batch(images, labels, device_params, devices, lr):
    """One step of all devices together; returns the mean loss, which nobody has waited for yet."""
    shards = gp.split_and_load((images, labels), devices)
    with autograd.record():  # each device runs its own copy of the net on its own shard, all at the same time
        losses = gp.parallel_apply(compute_loss, [(x, y, params) for (x, y), params in zip(shards, device_params)])
    gp.parallel_apply(nd.NDArray.backward, losses)
    for params in device_params[len(shards) :]:  # a last batch can be too small to give every device a sample;
        for param in params:  # the gradient of no sample is 0, not that of the batch before
            param.grad[:] = 0
    for copies in zip(*device_params):  # one parameter's copies on all devices
        gp.allreduce([copy.grad for copy in copies])
    for params in device_params:  # equal weights, equal gradients: equal weights again
        sgd(params, lr, len(labels))
    return sum(loss.sum().as_in_context(mx.cpu()) for loss in losses) / len(labels)


def main(config: Config, run: gp.Run) -> None:
    devices = gp.devices(config.devices)  # where we run
    data = gp.datasets.load(config.dataset, root=config.data_root)
    train = gp.datasets.batches(*data.train, config.batch_size, shuffle=True, seed=config.seed)
    test = gp.datasets.batches(*data.test, config.batch_size)

    _, channels, height, width = data.train.images.shape
    params = init_params(channels, height, width, data.num_classes, config.scale)
    device_params = [get_params(params, device) for device in devices]

    def net(images):
        return lenet(images, device_params[devices.index(images.context)])

    loop = gp.Loop(train, seed=config.seed, run=run, saved=dict(zip(NAMES, zip(*device_params))))
    print(f"{run.folder}: LeNet from scratch on {config.dataset}, running on: {devices}")
    for _epoch in loop.epochs(config.epochs, config.patience):
        for images, labels in loop.loaders[0]:
            loop.add(train_batch(images, labels, device_params, devices, config.lr), len(labels))
        [(_, accuracy)] = gp.evaluate(net, test, "acc", devices)
        loop.end_epoch(score=accuracy, test_accuracy=accuracy)


if __name__ == "__main__":
    sys.exit(gp.start(main, Config, DEFAULT, description=__doc__))
