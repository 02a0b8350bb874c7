"""Checkpoints of pipelines and unsplit nets are one; a resumed pipeline continues bit for bit."""

import numpy as np
import pytest
from pipeline_nets import assert_equal, batch, cpus, layers, reference, trainer_of, values

import gluon_parallel as gp
from mxnet import gluon

LOSS = gluon.loss.L2Loss()
BATCHES = [batch(8, seed=seed) for seed in range(4)]


def pipe_and_trainer(net, rows=None, optimizer="sgd"):
    pipe = gp.Pipeline(net, rows or cpus(0, 1), 3)
    return pipe, trainer_of(pipe.collect_params(), optimizer)


def train(pipe, trainer, batches):
    for x, y in batches:
        pipe.step(LOSS, trainer, x, y)


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
    train(pipe, trainer, BATCHES[:2])
    gp.checkpoint.save(str(tmp_path / "state"), pipe.net, trainer)
    train(pipe, trainer, BATCHES[2:])
    again, pipe, trainer = make("other_")
    gp.checkpoint.load(str(tmp_path / "state"), pipe.net, trainer)
    train(pipe, trainer, BATCHES[2:])
    theirs = values(again)
    for name, value in values(net).items():
        np.testing.assert_array_equal(value, theirs[name])


@pytest.mark.parametrize("as_list", [False, True])
def test_weights_and_the_trainers_state_go_to_the_unsplit_net_and_back(tmp_path, as_list):
    wanted = layers()
    reference(wanted, LOSS, BATCHES)
    net = layers()
    pipe, trainer = pipe_and_trainer([*net], cpus(0, 1, 2, 3)) if as_list else pipe_and_trainer(net)
    train(pipe, trainer, BATCHES[:2])
    gp.checkpoint.save(str(tmp_path / "pipe"), pipe.net, trainer)
    one = layers(prefix="other_")
    trainer = trainer_of(one.collect_params(), update_on_kvstore=False)
    gp.checkpoint.load(str(tmp_path / "pipe"), one, trainer)
    reference(one, LOSS, BATCHES[2:3], trainer)
    gp.checkpoint.save(str(tmp_path / "one"), one, trainer)
    gp.checkpoint.load(str(tmp_path / "one"), pipe.net, trainer := trainer_of(pipe.collect_params()))
    train(pipe, trainer, BATCHES[3:])
    assert_equal(net, wanted)
