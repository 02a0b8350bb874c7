"""Sharded optimizer state in one process: over its devices, beside whole states, and what it is refused with."""

import numpy as np
import pytest
from kvstore_shards import CASES, bits, held, make, train, train_by_hand

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.reduce import shards
from gluon_parallel.reduce.shards import owner_bounds
from mxnet import gluon, nd

CPUS = [mx.cpu(number) for number in range(3)]


@pytest.mark.parametrize(("optimizer", "options", "step"), CASES)
def test_sharded_updates_have_the_bits_of_plain_ones(optimizer, options, step):
    (plain, whole, _), (net, trainer, _) = made = [
        make(None, CPUS, optimizer, options, shard, **step) for shard in (False, True)
    ]
    for *_, parallel in made:
        train(parallel, None, 0, 6, step.get("dtype", "float32"))
    assert bits(plain) == bits(net)
    assert held(whole) == len(CPUS) * held(trainer) > 0


def test_a_hand_written_loop_updates_a_sharded_state_as_a_whole_one():
    trained = [make(None, CPUS, "adam", {"wd": 0.01}, shard) for shard in (False, True)]
    for net, trainer, parallel in trained:
        train(parallel, None, 0, 2)
        train_by_hand(net, trainer, None, CPUS)
    assert bits(trained[0][0]) == bits(trained[1][0])


@mx.optimizer.register
class OfItsOwn(mx.optimizer.SGD):
    """Of no known kind: its parameters have one owner each, and without shards the first device updates all."""


NAMES = ["nag", "rmsprop", "adagrad", "adadelta", "ftml", "ftrl", "signum", "dcasgd", "ofitsown"]


@pytest.mark.parametrize("name", NAMES)
def test_optimizers_update_parts_of_arrays_as_the_whole_ones(name, caplog):
    options = {"momentum": 0.9} if name == "nag" else {"centered": True} if name == "rmsprop" else {}
    trained = [make(None, CPUS, name, options, shard) for shard in (False, True)]
    for *_, parallel in trained:
        train(parallel, None, 0, 4)
    assert bits(trained[0][0]) == bits(trained[1][0])
    assert ("OfItsOwn is no optimizer of MXNet's" in caplog.text) == (name == "ofitsown")


@pytest.mark.parametrize("frozen", [[0], [1, 3], [5], [0, 2, 4]])
@pytest.mark.parametrize("name", ["sgd", "nag", "adam", "lamb"])
def test_a_parameter_that_was_frozen_gets_the_rates_of_a_schedule_as_without_shards(name, frozen):
    """Counts of updates differ then, and a rate follows from the largest count of what was updated before."""

    def trained(shard):
        net = gluon.nn.HybridSequential()
        net.add(*(gluon.nn.Dense(7, in_units=7) for _ in range(3)))  # six arrays: more than SGD updates at once
        net.initialize(ctx=CPUS)
        for number, parameter in enumerate(net.collect_params().values()):
            values = np.random.default_rng(number).normal(size=parameter.shape)
            parameter.set_data(nd.array(values))
        schedule = mx.lr_scheduler.FactorScheduler(1, 0.5, base_lr=0.1)
        parameters = [*net.collect_params().values()]
        trainer = gluon.Trainer(parameters, name, {"lr_scheduler": schedule})
        step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, shard_optimizer=shard)
        for number in range(6):
            for place in frozen:
                parameters[place].grad_req = "null" if number < 2 else "write"
            random = np.random.default_rng(number)
            step(*(nd.array(random.normal(size=(5, 7))) for _ in range(2)))
        return list(bits(net).values())  # by the blocks' names

    assert trained(False) == trained(True)


def test_convolutions_that_onednn_has_laid_out_anew_are_updated_in_parts():
    def trained(shard):
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Conv2D(16, 3, in_channels=3), gluon.nn.Conv2D(16, 3, in_channels=16), gluon.nn.Flatten())
        net.initialize(mx.init.Constant(0.01), ctx=CPUS[:2])
        net.hybridize()
        trainer = gluon.Trainer(net.collect_params(), "adam")
        step = gp.DataParallel(net, gluon.loss.L2Loss(), trainer, shard_optimizer=shard)
        x = nd.array(np.random.default_rng(1).normal(size=(4, 3, 8, 8)))
        for _ in range(3):
            step(x, nd.ones((4, 16 * 16)))
            net(x).wait_to_read()  # a prediction lays weights out anew
        return bits(net)

    assert trained(False) == trained(True)


@pytest.mark.parametrize("whole", [False, True])
def test_every_value_has_one_owner_and_owners_have_alike_many_and_take_turns(rng, monkeypatch, whole):
    for turn in [1 << 20] * 30 + [100] * 10:
        monkeypatch.setattr(shards, "_TURN", turn)
        sizes, num = rng.integers(0, 400, rng.integers(1, 50)).tolist(), int(rng.integers(1, 9))
        bounds = np.array(owner_bounds(sizes, num, whole))
        assert (bounds[:, 0] == 0).all() and bounds[:, -1].tolist() == sizes
        own = np.diff(bounds, axis=1)
        assert (own >= 0).all() and (not whole or np.isin(own, [0, *sizes]).all())
        # Cuts lie at most half of the largest array, or an alignment of 16 values, beside the even ones.
        if turn > 100:
            assert (abs(own.sum(axis=0) - sum(sizes) / num) <= (max(sizes) if whole else 17)).all(), own
        # So they sum, update and copy at the same time, whichever gradients are ready: by groups of so many values.
        total = np.cumsum(own, axis=0)
        assert turn > 100 or (total.max(axis=1) - total.min(axis=1) <= num * (100 + 17) + 400).all(), total


def test_layers_that_are_trained_later_or_not_for_a_time_are_divided_and_updated():
    def trained(shard):
        net, _, parallel = make(None, CPUS, "adam", {}, shard)
        net.second.grad_req = "null"
        train(parallel, None, 0, 2)
        net.second.grad_req = "write"
        train(parallel, None, 2, 2)
        for number, grad_req in enumerate(("null", "write")):  # each gives it new arrays for its gradient
            net.first.grad_req = grad_req
            train(parallel, None, 4 + 2 * number, 2)
        return bits(net)

    assert trained(False) == trained(True)


def test_states_from_before_are_divided_and_checkpoints_hold_them_whole(tmp_path):
    devices, (plain, trainer, parallel) = CPUS[:2], make(None, CPUS[:2], "adam", {}, False)
    train(parallel, None, 0, 3)
    gp.checkpoint.save(tmp_path / "plain.npz", plain, trainer)
    net, sharded, _ = make(None, devices, "adam", {}, False)
    gp.checkpoint.load(tmp_path / "plain.npz", net, sharded)  # every device has all of it
    parallel_of_it = gp.DataParallel(net, gluon.loss.L2Loss(), sharded, devices, shard_optimizer=True)
    gp.checkpoint.save(tmp_path / "sharded.npz", net, sharded)
    first, second = (gp.archive.read(tmp_path / f"{name}.npz") for name in ("plain", "sharded"))
    assert first.facts == second.facts
    assert all((array == second.arrays[key]).all() for key, array in first.arrays.items())
    for one in (parallel, parallel_of_it):
        train(one, None, 3, 3)
    assert bits(plain) == bits(net)
    assert 2 * held(sharded) == held(trainer)


def test_gluons_own_files_of_a_part_of_the_state_are_refused(tmp_path):
    _, trainer, parallel = make(None, CPUS, "adam", {}, True)
    train(parallel, None, 0, 1)
    with pytest.raises(gp.errors.CheckpointError, match="this process has a part .* write gp.checkpoint.save"):
        trainer.save_states(str(tmp_path / "states"))


def test_what_cannot_be_divided_is_refused():
    for name in ("nadam", "sgld", "lars"):
        with pytest.raises(ValueError, match="cannot update a part of them; take another optimizer"):
            make(None, CPUS, name, {}, True)
    net = gluon.nn.Embedding(5, 2, sparse_grad=True)
    net.initialize(ctx=CPUS)
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    with pytest.raises(gp.errors.GradientUnavailable, match="row_sparse, which cannot be divided"):
        gp.DataParallel(net, gluon.loss.L2Loss(), trainer, shard_optimizer=True)

    @mx.kv.KVStoreBase.register
    class SumsOnly(gp.kvstore.base.Store):
        type, num_workers = "sums_only", 2

    with pytest.raises(ValueError, match="store 'sums_only' cannot gather .* take the store mpi"):
        make(SumsOnly(), CPUS, "sgd", {}, True)


def test_on_one_device_of_one_process_it_says_that_it_has_no_effect(caplog):
    _, trainer, parallel = make(None, CPUS[:1], "adam", {}, True)
    assert "shard_optimizer=True has no effect on one process with one device" in caplog.text
    train(parallel, None, 0, 1)
    assert held(trainer) == 2 * sum(parameter.data().size for parameter in trainer._params)
