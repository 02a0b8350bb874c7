"""BatchNorm in a pipeline: statistics of each micro-batch, or with SyncBatchNorm those of the whole batch."""

import functools

import pytest
from pipeline_nets import assert_equal, batch, cpus, reference, set_weights, trainer_of

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, gluon

LOSS, SYNC = gluon.loss.L2Loss(), gp.nn.SyncBatchNorm
BATCHES = [batch(num, seed=seed) for seed, num in enumerate((11, 8, 8))]


@pytest.mark.parametrize("recompute", [False, True])
def test_batch_norm_takes_the_statistics_of_each_micro_batch_and_says_so(recompute):
    def make():
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Dense(6, in_units=6), gluon.nn.BatchNorm(in_channels=6), gluon.nn.Dense(6, in_units=6))
        return set_weights(net)

    one, net = make(), make()
    x, y = batch(8)
    for parameter in one.collect_params().values():
        if parameter.grad_req != "null":
            parameter.grad_req = "add"
    for part in range(2):
        with autograd.record():
            loss = LOSS(one(x[4 * part : 4 * part + 4]), y[4 * part : 4 * part + 4])
        loss.backward()
    pipe = gp.Pipeline(net, cpus(0, 1), 2, recompute=recompute)
    with pytest.warns(gp.errors.StatisticsPerDevice, match="micro-batch"):
        pipe.step(LOSS, gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0}), x, y)
    assert_equal(net, one, "grad")
    assert_equal(net, one)  # running statistics


class Counts(gluon.Block):
    """Counts its forward passes in training in a running statistic, as batch norm on GPUs changes its own."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.running_mean = self.params.get("running_mean", shape=(1,), init="zeros", grad_req="null")

    def forward(self, x):
        if autograd.is_training():
            with autograd.pause():
                self.running_mean.data(x.ctx)[:] += 1
        return x * 2


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_recomputation_changes_running_statistics_once(order, recompute):
    blocks = [Counts(), gluon.nn.Dense(6, in_units=6)]
    for block in blocks:
        set_weights(block)
    pipe = gp.Pipeline(blocks, cpus(0, 1), 4, order, recompute)
    pipe.step(LOSS, trainer_of(pipe.collect_params()), *batch(8))
    assert blocks[0].running_mean.data().asscalar() == 4


def with_norm(norm, *places):
    """Five dense layers; behind those at `places` one for normalisation."""
    net = gluon.nn.HybridSequential()
    for number in range(5):
        net.add(gluon.nn.Dense(6, in_units=6, activation="tanh"))
        if number in places:
            net.add(norm(in_channels=6))
    return set_weights(net)


class Calls(gluon.Block):
    """Counts its calls, and drops out."""

    def __init__(self):
        super().__init__()
        self.num, self.dropout = 0, gluon.nn.Dropout(0.5)

    def forward(self, x):
        self.num += 1
        return self.dropout(x)


def test_only_stages_of_several_passes_are_recomputed():
    """The loss is linear in the last weights, so it follows from their gradient if the same numbers were dropped."""
    calls, last = [Calls(), Calls()], gluon.nn.Dense(1, in_units=6, use_bias=False)
    stages = [gluon.nn.Sequential() for _ in range(3)]
    stages[0].add(calls[0], SYNC(in_channels=6))
    stages[1].add(calls[1], last)
    stages[2].add(gluon.nn.HybridLambda("identity"))
    for stage in stages:
        set_weights(stage)
    pipe = gp.Pipeline(stages, cpus(0, 1, 2), 3, "gpipe", recompute=True)
    frozen = gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0})
    with pytest.warns(UserWarning, match="no effect in stage 0:"):
        mean = pipe.step(lambda out: out, frozen, BATCHES[1][0][:6])
    assert [one.num for one in calls] == [1, 5]  # of the last micro-batch the second stage has the activations still
    assert (last.weight.grad() * last.weight.data()).sum().asscalar() / 6 == pytest.approx(mean.asscalar(), rel=1e-9)


@pytest.mark.parametrize("rows", [[cpus(0, 1)], [cpus(0, 1), cpus(2, 3)]])
@pytest.mark.parametrize("hybridize", [False, True])
def test_constant_statistics_need_no_common_pass(hybridize, rows):
    constant = {"use_global_stats": True, "running_mean_initializer": mx.init.Constant(0.5)}
    made = [with_norm(functools.partial(norm, **constant), 0, 3) for norm in (gluon.nn.BatchNorm, SYNC)]
    one, net = made
    reference(one, LOSS, BATCHES)
    net.hybridize(active=hybridize)
    pipe = gp.Pipeline(net, rows, 3, recompute=True)
    trainer = trainer_of(pipe.collect_params())
    profiles = [pipe.profile(LOSS, trainer, x, y) for x, y in BATCHES]
    assert all(profile.counts == [3, 3] for profile in profiles)
    assert_equal(net, one)


def test_a_stage_with_sync_batch_norm_runs_all_micro_batches_in_one_pass_and_the_others_overlap():
    net = with_norm(gp.nn.SyncBatchNorm, 0)
    pipe = gp.Pipeline([net[:2], net[2:4], net[4:]], cpus(0, 1, 2), 3)
    profile = pipe.profile(LOSS, trainer_of(pipe.collect_params()), *BATCHES[0])
    assert profile.counts == [1, 3, 3] and profile.num_held == [1, 2, 1]
    assert sorted(task.stage for task in profile.passes[0]) == [0] * 2 + [1] * 6 + [2] * 6
    # In units of a third of a stage's time: 3, then 4 for the others' passes, and the same backward.
    assert "predicted 57%" in str(profile)
