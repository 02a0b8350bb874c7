"""Checks of buckets between hosts, which follow the order in which gradients become ready."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.mpi import buckets
from gluon_parallel.kvstore.step_plan import plan_of
from mxnet import gluon, nd

WIDTH = 500  # a layer's weights have 1 MB, and with its biases the first bucket is full


class HeadFirst(gluon.HybridBlock):
    """A net that has its head registered before its body."""

    def __init__(self):
        super().__init__()
        self.head = gluon.nn.Dense(2, in_units=WIDTH)
        self.body = gluon.nn.HybridSequential()
        for _ in range(3):
            self.body.add(gluon.nn.Dense(WIDTH, in_units=WIDTH, activation="tanh"))

    def hybrid_forward(self, F, x):
        return self.head(self.body(x))


def check_buckets_follow_the_backward_pass_of_a_net_whose_head_is_registered_first(store):
    """From the third step on the head travels first, on all processes, one of which has no samples in that step."""
    net = HeadFirst()
    net.initialize(mx.init.Xavier())
    net.hybridize(backward_bulk_size=0)  # otherwise the gradients of few layers are ready at the same moment
    net.body[1].bias.grad_req = "null"
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="mpi")
    step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer)
    rng, found = np.random.default_rng(store.rank), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_WORTH", 1.0)  # the pass is short, and other processes compute too
        for _ in range(5):
            x, y = (nd.array(rng.normal(size=(2000, width))) for width in (WIDTH, 2))
            step(*((x, y) if store.rank else (None,)))
            mx.nd.waitall()
            found.append(plan_of(trainer)._store_plan.buckets)
    head = {0, 1}
    assert not any(head & {*plan[0]} for plan in found[:2]), found
    assert all(head <= {*plan[0]} and plan == found[2] for plan in found[2:]), found
    assert sorted(sum(found[2], [])) == [0, 1, 2, 3, 4, 5, 6], found
    rows = gp.metrics.gather_rows(net.body[0].weight.data().asnumpy()[:1], store)
    assert (rows == rows[0]).all()


def check_a_list_of_keys_that_is_summed_twice_keeps_its_buckets(store):
    """Sums are right over old and new buckets, of which only lists that are used again get some."""
    mine = gp.kvstore.create("mpi")
    for turn, num in enumerate([3, 3, 4, 4, 4, 4]):
        arrays = [nd.full((100_000,), store.rank + 10 * turn + number) for number in range(num)]
        mine.pushpull([f"list {number}" for number in range(num)], arrays)
        for number, array in enumerate(arrays):
            wanted = sum(rank + 10 * turn + number for rank in range(store.num_workers))
            assert (array.asnumpy() == wanted).all(), (turn, number)
    known = {len(keys): ready.times for keys, ready in mine.ready_times.items()}
    assert known[3] is None and len(known[4]) == 4 and not known[4].min() < 0
    rows = store.gather("times", known[4])
    assert (rows == rows[0]).all()
