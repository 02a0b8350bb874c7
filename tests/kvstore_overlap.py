"""Checks of exchanges that go on while the backward pass does, and of messages that travel together."""

import collections
import threading
import time

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.mpi.messages import PACKET
from mxnet import gluon, nd

DEVICES = gp.devices("cpu:2")


class Held(mx.operator.CustomOp):
    """Hands on what it gets; going backward it waits until somebody lets it go on.

    MXNet keeps a script that has an operator of its own beyond the interpreter's end, and with it the script's store.
    """

    go_on = threading.Event()
    waited_in_vain = False

    def forward(self, is_train, req, in_data, out_data, aux):
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req, out_grad, in_data, out_data, in_grad, aux):
        if not Held.go_on.wait(30):
            Held.waited_in_vain = True
        self.assign(in_grad[0], req[0], out_grad[0])


@mx.operator.register("held")
class HeldProp(mx.operator.CustomOpProp):
    """Makes a :class:`Held`."""

    def create_operator(self, ctx, shapes, dtypes):
        return Held()


def check_gradients_are_exchanged_during_the_backward_pass(store):
    """The last layer's gradient is exchanged while the first layer's backward operator is still to come."""
    net = gluon.nn.HybridSequential()
    first, last = gluon.nn.Dense(4, in_units=3), gluon.nn.Dense(2, in_units=4)
    net.add(first, gluon.nn.HybridLambda(lambda F, x: F.Custom(x, op_type="held")), last)
    net.initialize(ctx=DEVICES)
    made = gluon.Trainer(net.collect_params(), "sgd", kvstore=store, update_on_kvstore=False)
    step = gp.DataParallel(net, gluon.loss.L2Loss(), made, DEVICES)
    x, y = nd.ones((4, 3)) * (store.rank + 1), nd.ones((4, 2))
    for turn in range(4):  # the first time, keys are agreed upon; later ones take shorter ways
        Held.go_on.clear()
        step(x, y)
        for grad in last.weight.list_grad() + last.bias.list_grad():
            grad.wait_to_read()  # the sum over the processes, then
        assert not Held.waited_in_vain, f"step {turn}: nothing was exchanged before the end of the backward pass"
        Held.go_on.set()
        mx.nd.waitall()
    sums = gp.metrics.gather(first.weight.grad(DEVICES[1]).asnumpy().reshape(1, -1), store)
    assert sums.any() and (sums == sums[0]).all()


class Counted:
    """A communicator that counts what is sent, by tag."""

    def __init__(self, comm):
        self.comm, self.sent = comm, collections.Counter()

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Isend(self, data, rank, tag):
        self.sent[tag] += 1
        return self.comm.Isend(data, rank, tag)


def check_waiting_messages_are_sent_together(store):
    """Small messages that wait to be sent leave together: one packet for each other process."""
    progress, arrays = store._progress, [nd.full((key + 1,), store.rank) for key in range(100)]
    for key, array in enumerate(arrays):
        store.pushpull(key, array)
    mx.nd.waitall()
    comm, end = progress.messages._comm, time.monotonic() + 60
    for turn in range(3):
        with progress._lock:  # as if a message were just being moved
            progress.messages._comm = counted = Counted(comm)
            for key, array in enumerate(arrays):
                array[:] = key + turn
                store.pushpull(key, array)
            while len(progress._submitted) < len(arrays):
                assert time.monotonic() < end
                time.sleep(0.001)
            assert not counted.sent
        for key, array in enumerate(arrays):
            assert (array.asnumpy() == (key + turn) * store.num_workers).all()
        progress.messages._comm = comm
        assert counted.sent == {PACKET: store.num_workers - 1}, counted.sent
