"""A training script of one's own on all devices and processes, with gp.prepare; continues after a failure.

python scripts/train_your_own.py                                             one process
gluon-parallel launch -n 2 --devices cpu:1 scripts/train_your_own.py         two processes, the same weights
mpirun -n 2 python -m gluon_parallel run scripts/train_your_own.py           the same
"""

import argparse

import gluon_parallel as gp  # first: it makes the next line work
import mxnet as mx
from mxnet import gluon

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("folder", nargs="?", default="runs/your_own", help="checkpoints and log (default: %(default)s)")
parser.add_argument("--epochs", type=int, default=10, help="passes over the images (default: 10)")
options = parser.parse_args()

data = gp.datasets.load("digits")
train = gluon.data.DataLoader(gluon.data.ArrayDataset(*data.train), batch_size=256, shuffle=True)
test = gluon.data.DataLoader(gluon.data.ArrayDataset(*data.test), batch_size=256)
net = gp.models.LeNet(num_classes=10)
net.initialize(mx.init.Xavier(), ctx=gp.devices("auto"))
net.hybridize()
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.002})
loss = gluon.loss.SoftmaxCrossEntropyLoss()

training, train, test = gp.prepare(net, loss, trainer, train, test, run=gp.Run(options.folder))
training.print(f"running on {training}")
for _epoch in training.epochs(options.epochs):
    for images, labels in train:
        training.step(images, labels)
    [(_, accuracy)] = training.evaluate(test, "acc")
    training.end_epoch(score=accuracy, test_accuracy=accuracy)
