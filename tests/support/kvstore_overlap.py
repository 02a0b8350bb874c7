"""Check of exchanges that go on while the backward pass does."""

import threading

import gluon_parallel as gp
import mxnet as mx
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
    # Between hosts the last layer's gradients fill the first bucket, of 1 MB, and the first layer's has no place in it.
    first, last = gluon.nn.Dense(4, in_units=60_000, use_bias=False), gluon.nn.Dense(40_000, in_units=4)
    net.add(first, gluon.nn.HybridLambda(lambda F, x: F.Custom(x, op_type="held")), last)
    net.initialize(ctx=DEVICES)
    made = gluon.Trainer(net.collect_params(), "sgd", kvstore=store, update_on_kvstore=False)
    step = gp.DataParallel(net, gluon.loss.L2Loss(), made, DEVICES)
    x, y = nd.ones((4, 60_000)) * (store.rank + 1), nd.ones((4, 40_000))
    for turn in range(4):  # the first time, keys are agreed upon; later ones take shorter ways
        Held.go_on.clear()
        step(x, y)
        for grad in last.weight.list_grad() + last.bias.list_grad():
            grad.wait_to_read()  # the sum over the processes, then
        assert not Held.waited_in_vain, f"step {turn}: nothing was exchanged before the end of the backward pass"
        Held.go_on.set()
        mx.nd.waitall()
    sums = gp.metrics.gather_rows(first.weight.grad(DEVICES[1]).asnumpy()[:1, :100], store)
    assert sums.any() and (sums == sums[0]).all()
