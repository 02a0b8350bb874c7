"""A net of the examples, as ``gluon-parallel parity --net parity_nets.py:resnet20`` takes it."""

import gluon_parallel as gp
from mxnet import gluon


def resnet20(store):
    """GluonCV's ResNet-20 on pictures of 16 x 16; each batch norm spans devices and processes."""
    from gluoncv import model_zoo  # here, for pytest looks for examples in this file without GluonCV's warnings allowed

    net = model_zoo.get_model("cifar_resnet20_v1", classes=10)
    gp.nn.convert_sync_batchnorm(net, kvstore=store)

    def batch(num, rng):
        return rng.random((num, 3, 16, 16)), rng.integers(0, 10, num)

    return net, gluon.loss.SoftmaxCrossEntropyLoss(), batch
