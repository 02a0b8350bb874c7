"""Anybody's loop writes its state to a file, and continues from it as if nothing had been."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, gluon, nd


def make(num_devices=1, units=3):
    net = gluon.nn.Dense(units, in_units=4)
    net.initialize(mx.init.Xavier(), ctx=[mx.cpu(index) for index in range(num_devices)])
    schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
    return net, gluon.Trainer(net.collect_params(), "adam", {"lr_scheduler": schedule})


def train(net, trainer, steps):
    """A loop of somebody's own, without a word of this package."""
    devices = net.weight.list_ctx()
    for step in steps:
        random = np.random.RandomState(step)
        for device in devices:
            x = nd.array(random.standard_normal((2, 4)), ctx=device)
            with autograd.record():
                loss = (net(x) ** 2).sum()
            loss.backward()
        trainer.step(2 * len(devices))
    return net.weight.list_data()[0].asnumpy()


def test_a_loop_of_ones_own_continues_bit_for_bit_with_what_it_saved_beside(tmp_path):
    path = tmp_path / "new" / "folder" / "checkpoint.npz"
    net, trainer = make(2)
    start = {name: parameter.data(mx.cpu(0)) for name, parameter in net.collect_params().items()}
    straight, straight_trainer = make(2)
    for parameter, value in zip(straight.collect_params().values(), start.values()):
        parameter.set_data(value)
    wanted = train(straight, straight_trainer, range(9))
    train(net, trainer, range(5))
    own = {"epoch": 5, "best": np.float32(0.5), "names": ["a", "b"], "none": None, "history": np.arange(3.0)}
    assert gp.checkpoint.save(path, net, trainer, ones=nd.ones(2), **own) == path
    fresh, fresh_trainer = make(2)
    got = gp.checkpoint.load(path, fresh, fresh_trainer)
    assert [got[name] for name in ("epoch", "best", "names", "none")] == [5, 0.5, ["a", "b"], None]
    np.testing.assert_array_equal(got["history"], np.arange(3.0))
    np.testing.assert_array_equal(got["ones"], np.ones(2, np.float32))
    assert fresh_trainer.learning_rate == trainer.learning_rate
    np.testing.assert_array_equal(train(fresh, fresh_trainer, range(5, 9)), wanted)


def test_the_checkpoint_of_a_run_is_loaded_into_a_net_alone(tmp_path):
    net, trainer = make()
    loop = gp.Loop(net=net, trainer=trainer, run=gp.Run(tmp_path / "runs"))
    next(loop.epochs(1))
    loop.end_epoch()
    [path] = loop.run.checkpoints()
    other, _ = make()
    assert gp.checkpoint.load(path, other) == {"epoch": 1}
    for attempt in (other.load_parameters, other.collect_params().load, mx.nd.load):
        with pytest.raises(gp.errors.CheckpointError, match=r"gp.checkpoint.load\('.*epoch-0001.npz', net\)"):
            attempt(str(path))
    other.save_parameters(str(tmp_path / "net.params"))
    other.load_parameters(str(tmp_path / "net.params"))
    np.testing.assert_array_equal(other.weight.data().asnumpy(), net.weight.data().asnumpy())


def test_what_cannot_be_saved_or_loaded_is_told_in_a_sentence(tmp_path):
    net, trainer = make()
    path = tmp_path / "checkpoint.npz"
    with pytest.raises(gp.errors.CheckpointError, match=r"the value seen=\{1\} cannot be saved"):
        gp.checkpoint.save(path, net, trainer, seen={1})
    with pytest.raises(gp.errors.CheckpointError, match=r"net: got a Trainer.*the order is \(net, trainer\)"):
        gp.checkpoint.save(path, trainer, net)
    with pytest.raises(gp.errors.CheckpointError, match="checkpoint.npz cannot be read"):
        gp.checkpoint.load(path, net)
    with pytest.raises(gp.errors.CheckpointError, match=r"got a str, expected what.*gp.checkpoint.load\(path, net"):
        gp.checkpoint.restore(str(path), net)
    (tmp_path / "file").write_text("")
    with pytest.raises(gp.errors.OutputUnavailable, match="cannot be written"):
        gp.checkpoint.save(tmp_path / "file" / "checkpoint.npz", net)
    gp.archive.write(path, {}, {"mine": 1})
    with pytest.raises(gp.errors.CheckpointError, match="holds mine, no state of a net and its trainer"):
        gp.checkpoint.load(path, net)


@pytest.mark.parametrize("update_on_kvstore", [True, False])
def test_files_of_mxnet_and_checkpoints_that_are_mistaken_for_each_other_are_told_apart(tmp_path, update_on_kvstore):
    net, _ = make(2)
    trainer = gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=update_on_kvstore)
    train(net, trainer, range(1))
    parameters, states = (str(tmp_path / name) for name in ("net.params", "trainer.states"))
    path = str(gp.checkpoint.save(tmp_path / "checkpoint.npz", net, trainer))
    net.save_parameters(parameters)
    trainer.save_states(states)
    with pytest.raises(gp.errors.CheckpointError, match=r"write net\.load_parameters\('.*net.params'\)"):
        gp.checkpoint.load(parameters, net)
    with pytest.raises(gp.errors.CheckpointError, match=r"write trainer\.load_states\('.*trainer.states'\)"):
        gp.checkpoint.load(states, net)
    with pytest.raises(gp.errors.CheckpointError, match=r"gp\.checkpoint\.load\('.*checkpoint.npz', net, trainer\)"):
        trainer.load_states(path)
    with pytest.raises(gp.errors.CheckpointError, match=r"gp\.checkpoint\.load\('.*checkpoint.npz', net\)"):
        net.load_parameters(path)
    np.savez(tmp_path / "arrays.npz", weight=np.ones(3))  # a zip, but no checkpoint
    with pytest.raises(mx.base.MXNetError):
        net.load_parameters(str(tmp_path / "arrays.npz"))


def test_a_state_that_is_not_finite_is_not_saved_and_the_error_says_what_was(tmp_path):
    net, trainer = make()
    path = tmp_path / "checkpoint.npz"
    weight = net.weight.data().copy()
    net.weight.data()[:] = np.nan
    with pytest.raises(gp.errors.NotFinite, match="weight has a value that is NaN.*there is none from before"):
        gp.checkpoint.save(path, net, trainer)
    net.weight.set_data(weight)
    gp.checkpoint.save(path, net, trainer, epoch=1)
    net.weight.data()[:] = np.nan
    with pytest.raises(gp.errors.NotFinite, match="weight has a value that is NaN.*the one from before is as it was"):
        gp.checkpoint.save(path, net, trainer, epoch=2)
    assert gp.checkpoint.load(path, net, trainer) == {"epoch": 1}
