"""A pipeline's update is that of DataParallel on one device, also after a checkpoint, which unsplit nets can load."""

import numpy as np
import pytest
from pipeline_nets import TOLERANCE, assert_equal, batch, cpus, layers, reference, set_weights, trainer_of, values
from step_checks import Loss

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.pipeline.orders import ORDERS
from mxnet import gluon, nd

LOSS = gluon.loss.L2Loss()
BATCHES = [batch(num, seed=seed) for seed, num in enumerate((11, 8, 9, 8))]
EQUAL = [batch(8, seed=seed) for seed in range(4)]
ROWS = [[cpus(0, 1)], [cpus(0, 1), cpus(2, 3)]]


def on_one_device(net, loss, **options):
    return gp.DataParallel(net, loss, trainer_of(net.collect_params()), **options)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows", ROWS)
def test_sums_are_divided_by_their_counts_over_all_micro_batches_and_replicas(rows, order, recompute):
    masks = [nd.array(np.random.RandomState(1).uniform(size=y.shape) < 0.4, dtype="float64") for _, y in BATCHES]
    masks[1][:] = 0  # nothing counts at all
    one, net = layers(), layers()
    step, pipe = on_one_device(one, Loss()), gp.Pipeline(net, rows, 3, order, recompute)
    trainer = trainer_of(pipe.collect_params())
    assert pipe.parts == {}
    for (x, y), mask in zip(BATCHES, masks):
        wanted, found = step(x, (y, mask)), pipe.step(Loss(), trainer, x, (y, mask))
        assert found.asscalar() == pytest.approx(wanted.asscalar(), rel=1e-5, abs=1e-6)  # counts are added in float32
        for name, value in step.parts.items():
            assert pipe.parts[name].asscalar() == pytest.approx(value.asscalar(), rel=1e-5, abs=1e-6)
    assert_equal(net, one, rtol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("limit", "store"), [(None, "device"), (0.05, "local"), (0.05, None)])
def test_accumulated_and_clipped_gradients_are_those_of_data_parallel_whatever_the_store(rows, limit, store):
    one, net = layers(), layers()
    options = {"accumulate": 3, "clip_global_norm": limit}
    step, pipe = on_one_device(one, LOSS, **options), gp.Pipeline(net, rows, 3, **options)
    trainer = trainer_of(pipe.collect_params(), kvstore=store)
    before = values(net)
    for number, (x, y) in enumerate(BATCHES):
        step(x, y)
        pipe.step(LOSS, trainer, x, y)
        if number == 1:
            assert all((value == before[name]).all() for name, value in values(net).items()), "not before the third"
    step.update()  # of the last batch alone
    pipe.update()
    assert (pipe.gradient_norm is None) == (limit is None)
    if limit:
        np.testing.assert_allclose(pipe.gradient_norm.asnumpy(), step.gradient_norm.asnumpy(), rtol=1e-5)
        assert pipe.gradient_norm.asscalar() > limit
    assert_equal(net, one, rtol=1e-6 if limit else TOLERANCE["rtol"])  # the norm is a float32
    for parameter in net.collect_params().values():
        first, *others = (copy.asnumpy() for copy in parameter.list_data())
        assert all((first == other).all() for other in others)


class Fork(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        self.used, self.unused = gluon.nn.Dense(6, in_units=6), gluon.nn.Dense(6, in_units=6)

    def hybrid_forward(self, F, x):
        return self.used(x), self.unused(x)


def test_parameters_that_the_loss_does_not_reach_are_left_out_only_if_asked_for():
    def step(**options):
        fork = set_weights(Fork())
        pipe = gp.Pipeline([layers(), fork], cpus(0, 1), 2, **options)
        before = fork.unused.weight.data().asnumpy()
        pipe.step(lambda out, _, y: LOSS(out, y), trainer_of(pipe.collect_params()), *BATCHES[0])
        np.testing.assert_array_equal(fork.unused.weight.data().asnumpy(), before)

    with pytest.raises(gp.errors.GradientUnavailable, match="did not reach dense.*ignore_stale_grad=True"):
        step()
    step(ignore_stale_grad=True)


@pytest.mark.parametrize("replicas", ROWS)
@pytest.mark.parametrize(
    ("optimizer", "frozen", "steps"),
    [*(("sgd", frozen, range(4)) for frozen in ([3], [0, 2], [1, 2])),
     *((optimizer, [0, 1], [1]) for optimizer in ("sgd", "lars", "adam", "nadam"))],
)  # fmt: skip
def test_layers_that_are_frozen_for_some_steps_or_all_stay_and_the_others_learn_as_on_one_device(
    replicas, optimizer, frozen, steps
):
    def trainer_with_schedule(parameters):
        schedule = mx.lr_scheduler.FactorScheduler(1, 0.5, base_lr=0.1)
        options = {"momentum": 0.9} if optimizer in ("sgd", "lars") else {}
        return gluon.Trainer(parameters, optimizer, {"learning_rate": 0.1, "lr_scheduler": schedule, **options})

    one, net = layers(), layers()
    net.hybridize(active=len(frozen) > 1)
    step = gp.DataParallel(one, LOSS, trainer_with_schedule(one.collect_params()))
    pipe = gp.Pipeline(net, replicas, 2)
    trainer = trainer_with_schedule(pipe.collect_params())
    for number, (x, y) in enumerate(BATCHES):
        for layer in (half[place] for half in (one, net) for place in frozen):
            layer.collect_params().setattr("grad_req", "null" if number in steps else "write")
        step(x, y)
        pipe.step(LOSS, trainer, x, y)
    assert_equal(net, one, rtol=1e-6 if optimizer == "lars" else 1e-7)  # its norms are float32


def pipe_and_trainer(net, rows=None, optimizer="sgd"):
    pipe = gp.Pipeline(net, rows or cpus(0, 1), 3)
    return pipe, trainer_of(pipe.collect_params(), optimizer)


def train(pipe, trainer, batches):
    for x, y in batches:
        pipe.step(LOSS, trainer, x, y)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("rows", [cpus(2, 1), [cpus(0, 1), cpus(2, 3)]])
def test_a_trainer_that_was_made_and_has_updated_before_the_pipeline_goes_on_with_its_state(rows, optimizer):
    wanted, net = layers(), layers()
    reference(wanted, LOSS, EQUAL, trainer_of(wanted.collect_params(), optimizer))
    trainer = trainer_of(net.collect_params(), optimizer)
    reference(net, LOSS, EQUAL[:2], trainer)
    train(gp.Pipeline(net, rows, 3), trainer, EQUAL[2:])
    assert_equal(net, wanted)


@pytest.mark.parametrize("frozen", [0, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])  # adam's step depends on how many there were, in every stage
@pytest.mark.parametrize("rows", [cpus(0, 1), [cpus(0, 1), cpus(2, 3)]])
def test_a_resumed_pipeline_continues_bit_for_bit(tmp_path, rows, optimizer, frozen):
    def make(prefix):
        net = layers(prefix=prefix)
        for parameter in list(net.collect_params().values())[:frozen]:
            parameter.grad_req = "null"
        return net, *pipe_and_trainer(net, rows, optimizer)

    net, pipe, trainer = make("net_")
    train(pipe, trainer, EQUAL[:2])
    gp.checkpoint.save(str(tmp_path / "state"), pipe.net, trainer)
    train(pipe, trainer, EQUAL[2:])
    again, pipe, trainer = make("other_")
    gp.checkpoint.load(str(tmp_path / "state"), pipe.net, trainer)
    train(pipe, trainer, EQUAL[2:])
    theirs = values(again)
    for name, value in values(net).items():
        np.testing.assert_array_equal(value, theirs[name])


@pytest.mark.parametrize("as_list", [False, True])
def test_weights_and_the_trainers_state_go_to_the_unsplit_net_and_back(tmp_path, as_list):
    wanted = layers()
    reference(wanted, LOSS, EQUAL)
    net = layers()
    pipe, trainer = pipe_and_trainer([*net], cpus(0, 1, 2, 3)) if as_list else pipe_and_trainer(net)
    train(pipe, trainer, EQUAL[:2])
    gp.checkpoint.save(str(tmp_path / "pipe"), pipe.net, trainer)
    one = layers(prefix="other_")
    trainer = trainer_of(one.collect_params(), update_on_kvstore=False)
    gp.checkpoint.load(str(tmp_path / "pipe"), one, trainer)
    reference(one, LOSS, EQUAL[2:3], trainer)
    gp.checkpoint.save(str(tmp_path / "one"), one, trainer)
    gp.checkpoint.load(str(tmp_path / "one"), pipe.net, trainer := trainer_of(pipe.collect_params()))
    train(pipe, trainer, EQUAL[3:])
    assert_equal(net, wanted)
