"""Anybody's loop writes its state to a file, and continues from it as if nothing had been."""

import functools
import hashlib
import io
import json
import pickle
import re
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    with pytest.raises(gp.errors.CheckpointError, match=r"a pickle, .*It is not read"):
        gp.checkpoint.load(states, net)
    with pytest.raises(gp.errors.CheckpointError, match=r"gp\.checkpoint\.load\('.*checkpoint.npz', net, trainer\)"):
        trainer.load_states(path)
    with pytest.raises(gp.errors.CheckpointError, match=r"gp\.checkpoint\.load\('.*checkpoint.npz', net\)"):
        net.load_parameters(path)
    np.savez(tmp_path / "arrays.npz", weight=np.ones(3))  # a zip, but no checkpoint
    with pytest.raises(mx.base.MXNetError):
        net.load_parameters(str(tmp_path / "arrays.npz"))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The members of the checkpoint of a run, and the trainings that could load it."""
    folder = tmp_path_factory.mktemp("good")
    net, trainer = make(2)
    loop = training(folder, net, trainer)
    for _ in loop.epochs(1):
        for number in loop.loaders[0]:
            train(net, trainer, range(3))
            loop.add(nd.array([number]), num_samples=1)
        loop.end_epoch(score=1.0)
    (path,) = folder.glob("epoch-*.npz")
    with zipfile.ZipFile(path) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def training(folder, net, trainer):
    average = gp.ExponentialMovingAverage(net, trainer)
    average.update()
    saved = {"average": average, "mine": nd.zeros(3)}
    return gp.Loop([1.0], net=net, trainer=trainer, run=gp.Run(folder), saved=saved)


def forge(path, members, compression=zipfile.ZIP_STORED):
    """Write a file with these members and the right SHA-256."""
    with zipfile.ZipFile(path, "w", compression) as opened:
        for name, content in members.items():
            opened.writestr(name, content)
        opened.comment = b"0" * 64
    seal(path, path.read_bytes()[:-64])


def seal(path, content):
    path.write_bytes(content + hashlib.sha256(content).hexdigest().encode())


def packed(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def assert_refused(folder, may_load=False):
    """A run's continuation and gp.checkpoint.load refuse what is in the folder, and change nothing."""
    (path,) = folder.glob("epoch-*.npz")

    def load(net, trainer):
        average = gp.ExponentialMovingAverage(net, trainer)
        own = gp.checkpoint.load(path, net, trainer, average=average)
        if not (own["mine"].dtype, own["mine"].shape) == (np.float32, (3,)):  # the caller's own to check
            raise gp.errors.CheckpointError("of another shape")

    for resume in (functools.partial(training, folder), load):
        net, trainer = make(2)

        def there(net=net, trainer=trainer):
            arrays = [array.asnumpy().tolist() for array in net.weight.list_data()]
            return arrays, trainer.learning_rate, trainer.optimizer.num_update

        before = there()
        try:
            resume(net, trainer)
        except gp.errors.CheckpointError as error:
            assert there() == before or "of another shape" in str(error)
        else:
            assert may_load, "it was not refused"


STATE, OPTIMIZER, LOOP = ("facts", "state"), ("facts", "state", "optimizer"), ("facts", "loop")
FORGED = [  # where in the facts, and what stands there
    *[((), what) for what in (None, [], 7, "facts", {})],
    *[(("version",), what) for what in (None, "1", [1], 10**400)],
    *[(("facts",), what) for what in (None, 7, "facts", [1], {"state": None}, {"state": [1]})],
    *[(("facts", key), what) for key in ("own", "objects", "loop") for what in (7, [1], "x")],
    *[(("facts", "objects", "average"), what) for what in (None, {}, {"num_updates": "x", "trainer_updates": 0})],
    *[((*STATE, "optimizer"), what) for what in (7, [], {}, "adam")],
    *[((*OPTIMIZER, "values"), {name: what}) for name in ("lr", "num_update") for what in (None, "x", [1], {}, True)],
    *[((*OPTIMIZER, "values"), {name: 1}) for name in ("lr_scheduler", "update", "__class__", "beta1", "idx2name")],
    *[((*OPTIMIZER, "counts"), what) for what in (7, {"weight": "x"}, {"weight": -1}, {"weight": 1e9}, {"other": 1})],
    *[((*OPTIMIZER, "stateful"), what) for what in (7, "weight", [7], [["weight"]], ["other"], [None])],
    *[((*OPTIMIZER, "scheduler"), what) for what in (7, [1], {"base_lr": "x"}, {"other": 1})],
    *[((*LOOP, key), what) for key in ("epoch", "step", "sums", "num_samples") for what in (None, -1.5, "x", [])],
    *[((*LOOP, "loaders"), what) for what in (None, 7, [[0, 0]], [[0, 0, "x"]], [7])],
]


@pytest.mark.parametrize(("place", "what"), FORGED)
def test_nonsense_among_the_facts_of_a_checkpoint_with_the_right_checksum_is_refused(good, tmp_path, place, what):
    forge(tmp_path / "epoch-0001.npz", {**good, "facts.json": json.dumps(changed(good, place, what))})
    assert_refused(tmp_path)


def changed(members, place, what):
    """The facts of a checkpoint with something else at a place, which is a path of keys."""
    facts = {"": json.loads(members["facts.json"])}
    inner = facts
    for key in ("", *place)[:-1]:
        inner = inner[key]
    inner[("", *place)[-1]] = what
    return facts[""]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *[("facts.json", what) for what in (b"", b"{", b"\xff", b"[" * 10**5, b'{"version": ' + b"9" * 5000 + b"}")],
        *[("parameters/weight.npy", what) for what in (b"", b"7", b"\x93NUMPY\x01\x00", packed(7), packed(np.ones(2)))],
        ("parameters/weight.npy", packed(np.array([{}] * 12, object).reshape(3, 4))),
        ("parameters/weight.npy", packed(np.array([["x"] * 4] * 3))),
        ("parameters/weight.npy", packed(np.ones((3, 4), "float32")).replace(b"(3, 4)", b"(9**99,)")),
        (
            "parameters/weight.npy",
            packed(np.ones((3, 4), "float32")).replace(b"(3, 4), }    ", b"(3, 40000000000)}"),
        ),
        ("parameters/weight.npy", packed(np.ones((3, 4), "float32"))[:-1]),
        ("parameters/weight", packed(np.ones((3, 4), "float32"))),
        ("copies/weight.npy", packed(np.float32(1))),
        ("copies/weight.npy", packed(np.ones((0, 3, 4), "float32"))),
        ("own/mine.npy", packed(np.ones(4, "float32"))),
        ("own/mine.npy", packed(np.array(["x"] * 3))),
        ("objects/average/parameters/weight.npy", packed(np.ones(2))),
        ("optimizer/weight/0.npy", packed(np.ones(2))),
        ("optimizer/other/0.npy", packed(np.ones(2))),
        *[("hook/errors/weight.npy", packed(what)) for what in (np.ones(()), np.ones((0, 3, 4)), np.array(["x"]))],
        ("hook/residuals/weight.npy", packed(np.ones((2, 7)))),
        ("hook/shared/weight.npy", packed(np.array(["x"]))),
    ],
)
def test_nonsense_in_an_array_of_a_checkpoint_with_the_right_checksum_is_refused(good, tmp_path, name, content):
    forge(tmp_path / "epoch-0001.npz", {**good, name: content})
    assert_refused(tmp_path)


@pytest.mark.parametrize("missing", ["facts.json", "parameters/weight.npy", "optimizer/weight/0.npy", "own/mine.npy"])
def test_a_checkpoint_with_the_right_checksum_that_lacks_something_is_refused(good, tmp_path, missing):
    forge(tmp_path / "epoch-0001.npz", {name: content for name, content in good.items() if name != missing})
    if missing == "own/mine.npy":  # which only the run asks for
        with pytest.raises(gp.errors.CheckpointError, match="mine is not in the checkpoint"):
            training(tmp_path, *make(2))
    else:
        assert_refused(tmp_path)


@pytest.mark.parametrize("content", [b"", b"x" * 999, b"PK\x05\x06" + bytes(18), pickle.dumps({"weight": 1})])
def test_what_is_no_zip_is_refused_without_advice_to_unpickle_it(good, tmp_path, content):
    seal(tmp_path / "epoch-0001.npz", content)
    assert_refused(tmp_path)
    with pytest.raises(gp.errors.CheckpointError) as refused:
        gp.archive.read(tmp_path / "epoch-0001.npz")
    assert not re.search("allow_pickle|load_states|pickle.load", str(refused.value))
    assert not gp.archive.is_archive(tmp_path / "epoch-0001.npz")


def test_a_compressed_checkpoint_which_may_be_of_any_size_is_refused(good, tmp_path):
    forge(tmp_path / "epoch-0001.npz", good, zipfile.ZIP_DEFLATED)
    assert_refused(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(facts, above=()):
    """The paths of keys to all that is in the facts."""
    yield above
    for key, value in facts.items() if isinstance(facts, dict) else ():
        yield from places(value, (*above, key))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), what=JSON)
def test_a_checkpoint_with_anything_anywhere_loads_or_is_refused(good, data, what):
    place = data.draw(st.sampled_from([*places(json.loads(good["facts.json"]))]))
    with tempfile.TemporaryDirectory() as folder:
        forge(Path(folder) / "epoch-0001.npz", {**good, "facts.json": json.dumps(changed(good, place, what))})
        assert_refused(Path(folder), may_load=True)


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
