"""A pipeline's update is that of DataParallel on one device, also after a checkpoint, which unsplit nets can load."""

import numpy as np
import pytest
from pipeline_nets import assert_equal, batch, cpus, layers, reference, set_weights, trainer_of, values

import gluon_parallel as gp
from mxnet import gluon

LOSS = gluon.loss.L2Loss()
BATCHES = [batch(num, seed=seed) for seed, num in enumerate((11, 8, 9, 8))]
EQUAL = [batch(8, seed=seed) for seed in range(4)]


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


def test_a_pipeline_whose_shapes_follow_from_its_first_batch_loads_a_checkpoint_before_it(tmp_path):
    def make():
        stages = [gluon.nn.Dense(6, activation="tanh"), gluon.nn.Dense(6)]
        for stage in stages:
            stage.initialize()
        pipe = gp.Pipeline(stages, cpus(1, 2), 3)
        return pipe, trainer_of(pipe.collect_params(), "adam")

    batches = [[array.astype("float32") for array in one] for one in EQUAL]
    pipe, trainer = make()
    train(pipe, trainer, batches[:2])
    gp.checkpoint.save(str(tmp_path / "state"), pipe.net, trainer)
    train(pipe, trainer, batches[2:])
    again, trainer = make()
    gp.checkpoint.load(str(tmp_path / "state"), again.net, trainer)
    train(again, trainer, batches[2:])
    for name, value in values(pipe.net).items():
        np.testing.assert_array_equal(values(again.net)[name], value)
