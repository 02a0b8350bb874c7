"""Small nets, trainers and batches, and a profile of their steps."""

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

DEVICES = [mx.cpu(0), mx.cpu(1)]
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def net_of(norm=None):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(4, 3, in_channels=1), gluon.nn.Activation("relu"))
    if norm is not None:
        net.add(norm)
    net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(3, in_units=4))
    net.initialize(ctx=DEVICES)
    net.hybridize(static_alloc=True)
    return net


def trainer_of(net):
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})


def batch():
    return mx.nd.ones((8, 1, 12, 12)), mx.nd.zeros(8)


def profiled(folder, step, num=4, **options):
    with gp.profile(folder, **{"steps": 3, "skip": 1, **options}) as profile:
        for _ in range(num):
            step()
    return profile
