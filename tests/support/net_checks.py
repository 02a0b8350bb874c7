"""Checks that all of a net is process 0's from the first step on, whatever of it the trainer holds."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

DEVICES = gp.devices("cpu:2")


def rows_of(net, store):
    """For each parameter of a net, its copies on all devices of all processes as rows."""
    return {
        name: gp.metrics.gather_rows(np.array([copy.asnumpy().ravel() for copy in one.list_data()]), store)
        for name, one in net._collect_params_with_prefix().items()
    }


def backbone_and_head(rank, **known):
    """A net whose values are those of a rank; only its last layer is to be trained."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(3, use_bias=False, **known), gluon.nn.BatchNorm(use_global_stats=True))
    net.add(gluon.nn.Dense(1, in_units=3))
    net.initialize(mx.init.Constant(rank + 1), ctx=DEVICES)
    return net


class Centres(gluon.nn.HybridBlock):
    """A loss with a parameter that no trainer holds."""

    def __init__(self, rank):
        super().__init__()
        self.centre = self.params.get("centre", shape=(1, 1), init=mx.init.Constant(rank + 5))
        self.initialize(ctx=DEVICES)

    def hybrid_forward(self, F, output, label, centre):
        return F.sum(F.square(F.broadcast_sub(output, centre) - label), axis=1)


def check_what_the_trainer_does_not_hold_is_process_0s(store):
    """A frozen backbone, running statistics, and a parameter of the loss, also where shapes are known late."""
    for known in ({"in_units": 2}, {}):
        net, loss = backbone_and_head(store.rank, **known), Centres(store.rank)
        trainer = gluon.Trainer(net[2].collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=store)
        step = gp.DataParallel(net, loss, trainer)
        step(nd.ones((3 + store.rank, 2)), nd.zeros((3 + store.rank, 1)))
        for name, rows in {**rows_of(net, store), **rows_of(loss, store)}.items():
            assert (rows == rows[0]).all(), (name, rows)
        assert net[0].weight.data(DEVICES[1]).asnumpy().tolist() == [[1, 1]] * 3
        assert loss.centre.data(DEVICES[1]).asscalar() == 5
        gp.check_replicas(net, store)


def check_loops_with_a_trainer_start_from_all_of_process_0s_net(store):
    """gp.Loop and gp.survive know the net, of which the trainer has a part."""
    for connect in (
        lambda net, trainer: gp.Loop(net=net, trainer=trainer, store=store),
        lambda net, trainer: gp.survive(lambda batch: None, net, trainer),
    ):
        net = backbone_and_head(store.rank, in_units=2)
        net(nd.ones((1, 2), ctx=DEVICES[0]))
        net[1].running_var.set_data(nd.full(3, store.rank + 1))
        connect(net, gluon.Trainer(net[2].collect_params(), "sgd", kvstore=store, update_on_kvstore=False))
        assert net[0].weight.data(DEVICES[1]).asnumpy().tolist() == [[1, 1]] * 3
        assert net[1].running_var.data(DEVICES[1]).asnumpy().tolist() == [1] * 3


def check_a_pipelines_frozen_stage_is_process_0s(store):
    """The trainer holds the other stage alone."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(2, in_units=2), gluon.nn.Dense(1, in_units=2))
    net.initialize(mx.init.Constant(store.rank + 1))
    net[0].collect_params().setattr("grad_req", "null")
    pipe = gp.Pipeline(net, DEVICES, 2)
    trainer = gluon.Trainer(net[1].collect_params(), "sgd", kvstore=store)
    pipe.step(gluon.loss.L2Loss(), trainer, nd.ones((4, 2)), nd.zeros((4, 1)))
    for name, rows in rows_of(net, store).items():
        assert (rows == rows[0]).all(), (name, rows)


def check_layers_made_in_another_order_are_refused(store):
    """By their automatic names, the trainer of process 1 has them in another order; shapes are the same."""
    net = gluon.nn.HybridSequential(prefix="")
    first, second = gluon.nn.Dense(2, in_units=2), gluon.nn.Dense(2, in_units=2)
    net.add(*((second, first) if store.rank == 1 else (first, second)))
    net.initialize(ctx=DEVICES)
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=store, update_on_kvstore=False)
    step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer)
    said = r"0\.bias float32 \(2,\) as the trainer's parameter 0.*process 1 holds 1\.bias .*Make the same layers"
    with pytest.raises(gp.errors.WorkersDiffer, match=said):
        step(nd.ones((2, 2)), nd.zeros((2, 2)))


def check_a_frozen_weight_that_is_changed_on_one_process_is_found(store):
    """By check_replicas at once; one that has gradients also by the training itself."""
    net = backbone_and_head(0, in_units=2)
    trainer = gluon.Trainer(net[2].collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=store)
    step, batch = gp.DataParallel(net, gluon.loss.L2Loss(), trainer), (nd.ones((2, 2)), nd.zeros((2, 1)))
    step(*batch)
    for name, parameter in (("1.running_mean", net[1].running_mean), ("0.weight", net[0].weight)):
        before = parameter.data(DEVICES[0]).copy()
        parameter.set_data(before + store.rank)
        with pytest.raises(gp.errors.ReplicasDiffer, match=f"parameter {name} differs between the processes 0"):
            gp.check_replicas(net, store)
        parameter.set_data(before)
    gp.check_replicas(net, store)
    net[0].weight.set_data(net[0].weight.data(DEVICES[0]) + store.rank)
    with pytest.raises(gp.errors.ReplicasDiffer, match=r"parameter 0\.weight differs"):
        for _ in range(4):
            step(*batch)
