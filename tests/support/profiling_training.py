"""A training of six steps, for a test that profiles it in several processes; process 1 comes late to each."""

import time

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.commands.profiling import recording, session

store = gp.kvstore.create("auto")
net = mx.gluon.nn.HybridSequential()
net.add(mx.gluon.nn.Conv2D(4, 3, in_channels=1), gp.nn.SyncBatchNorm(in_channels=4, kvstore=store, prefix="norm_"))
net.add(mx.gluon.nn.GlobalAvgPool2D(), mx.gluon.nn.Dense(3, in_units=4))
session.host = lambda: f"host {store.rank}"  # so that the clocks have to be compared
offset = recording.offset


def told(reference, times):
    """The estimate; it prints by how many microseconds it may be wrong, half of what the tightest bounds leave."""
    bounds = (reference[:, 0] - times[:, 1]).max(), (reference[:, 1] - times[:, 0]).min()
    print("clocks", (bounds[1] - bounds[0]) / 2e3)
    return offset(reference, times)


recording.offset = told
# However late a device is: an exchange that is left to Python has no moment at which all devices had come.
net[1].sync_group.rendezvous.record.patience = 60 * 10**9
devices = gp.devices("cpu:2")
net.initialize(ctx=devices)
net.hybridize(static_alloc=True)
trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
step = gp.DataParallel(net, mx.gluon.loss.SoftmaxCrossEntropyLoss(), trainer)
size = 8 * (1 + store.rank)
for _ in range(6):
    time.sleep(0.3 * store.rank)
    loss = step(mx.nd.ones((size, 1, 12, 12)), mx.nd.zeros(size))
print("loss", loss.asscalar())
