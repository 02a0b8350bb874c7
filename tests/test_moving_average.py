"""ExponentialMovingAverage: the average that NumPy computes from the weights, on every device, saved and swapped in."""

import numpy as np
import pytest
from pipeline_nets import batch, layers

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

pytestmark = pytest.mark.filterwarnings("ignore::gluon_parallel.errors.StatisticsPerDevice")
LOSS = gluon.loss.L2Loss()
# Few updates, each rounded once or twice: 1e-16 or 6e-8 of values around 1; float16 has float32's.
TOLERANCE = {"float64": {"rtol": 1e-12, "atol": 1e-14}, "float32": {"rtol": 2e-6, "atol": 1e-6}}


def make(num_devices=1, dtype="float64", batch_norm=gluon.nn.BatchNorm, **options):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(6, in_units=6), batch_norm(in_channels=6), gluon.nn.Dense(6, in_units=6))
    net.cast(dtype)
    net.initialize(ctx=[mx.cpu(index) for index in range(num_devices)])
    random = np.random.RandomState(0)
    for name, parameter in net.collect_params().items():
        if name.endswith(("weight", "bias")):
            parameter.set_data(nd.array(random.standard_normal(parameter.shape), dtype=dtype))
    trainer = gluon.Trainer(net.collect_params(), "adamw", {"learning_rate": 0.05})
    return net, trainer, gp.DataParallel(net, LOSS, trainer, **options)


def train(step, average, seeds, dtype="float64"):
    for seed in seeds:
        step(*(array.astype(dtype) for array in batch(7, seed=seed)))
        average.update()


def values(net):
    """The copies of every parameter: name -> (devices, ...)."""
    return {
        name: np.stack([copy.asnumpy() for copy in parameter.list_data()])
        for name, parameter in net._collect_params_with_prefix().items()
    }


def averages(net, average):
    with average.applied():
        return values(net)


def assert_close(found, wanted, dtype="float64"):
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, **TOLERANCE[dtype], err_msg=name)


def by_hand(history, decay, warmup=False):
    mean = {name: value.astype("float64") for name, value in history[0].items()}
    for number, weights in enumerate(history[1:], start=1):
        kept = min(decay, (1 + number) / (10 + number)) if warmup else decay
        mean = {name: kept * value + (1 - kept) * weights[name] for name, value in mean.items()}
    return mean


@pytest.mark.parametrize(
    ("num_devices", "dtype", "decay", "warmup"),
    [(1, "float64", 0.9, False), (3, "float64", 0.0, False), (3, "float64", 0.9, True), (2, "float32", 0.3, True)],
)
def test_it_is_the_average_of_the_weights_and_running_statistics_after_each_update(num_devices, dtype, decay, warmup):
    net, trainer, step = make(num_devices, dtype)
    average = gp.ExponentialMovingAverage(net, trainer, decay, warmup)
    history = []
    for seed in range(8):
        train(step, average, [seed], dtype)
        history.append(values(net))
    assert average.num_updates == 8
    assert any(
        "running_mean" in name and np.ptp(value, axis=0).any() == (num_devices > 1)
        for name, value in history[-1].items()
    )
    assert_close(averages(net, average), by_hand(history, decay, warmup), dtype)


def test_between_accumulated_steps_and_twice_after_an_update_nothing_is_added_unless_there_is_no_trainer():
    net, trainer, step = make(accumulate=3)
    average, of_calls = gp.ExponentialMovingAverage(net, trainer, 0.5), gp.ExponentialMovingAverage(net, decay=0.5)
    history, calls = [], []
    for seed in range(9):
        train(step, average, [seed])
        average.update()
        if seed % 3 == 2:
            history.append(values(net))
        for _ in range(2):
            of_calls.update()
            calls.append(values(net))
    assert (average.num_updates, of_calls.num_updates) == (3, 18)
    # running statistics move with every step, and are averaged with the weights
    assert_close(averages(net, average), by_hand(history, 0.5))
    assert_close(averages(net, of_calls), by_hand(calls, 0.5))


def test_an_optimizer_inside_the_store_counts_too():
    net, _, _ = make(2)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, update_on_kvstore=True)
    average = gp.ExponentialMovingAverage(net, trainer)
    for seed in range(2):
        for device in (mx.cpu(0), mx.cpu(1)):
            x, y = (array.as_in_context(device) for array in batch(5, seed=seed))
            with mx.autograd.record():
                loss = LOSS(net(x), y)
            loss.backward()
        trainer.step(10)
        trainer.optimizer.num_update = 0  # as where MXNet's servers count, in another process
        average.update()
    assert average.num_updates == 2


def test_weights_that_do_not_change_are_their_own_average_bit_for_bit():
    net, *_ = make(dtype="float32")
    average, before = gp.ExponentialMovingAverage(net, decay=0.999), values(net)
    for _ in range(50):
        average.update()
    with average.applied():
        for name, copies in values(net).items():
            np.testing.assert_array_equal(copies, before[name])


def test_the_weights_come_back_bit_for_bit_also_after_an_error():
    net, trainer, step = make(2, "float32")
    net.hybridize(static_alloc=True, static_shape=True)
    x = batch(5)[0].astype("float32")
    average = gp.ExponentialMovingAverage(net, trainer, 0.5)
    with average.applied():  # nothing has been added: the weights stay
        start = values(net)
    train(step, average, range(4), "float32")
    before, output = values(net), net(x).asnumpy()
    assert not np.array_equal(start["0.weight"], before["0.weight"])
    with pytest.raises(KeyError, match="metric"):
        with average.applied():
            inside = net(x).asnumpy()
            raise KeyError("metric")
    assert np.abs(inside - output).max() > 1e-3
    for name, value in values(net).items():
        np.testing.assert_array_equal(value, before[name])
    np.testing.assert_array_equal(net(x).asnumpy(), output)
    other, _, _ = make(1, "float32")
    for parameter, value in zip(other.collect_params().values(), averages(net, average).values()):
        parameter.set_data(nd.array(value[0]))
    np.testing.assert_allclose(other(x).asnumpy(), inside, rtol=1e-5, atol=1e-6)  # the two nets may round differently


def test_a_parameter_that_layers_share_comes_back():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(4, in_units=4))
    net.add(gluon.nn.Dense(4, in_units=4, params=net[0].params))
    net.initialize()
    average = gp.ExponentialMovingAverage(net, decay=0.5)
    for value in (1, 3):
        net[0].weight.set_data(nd.full((4, 4), value))
        average.update()
    with average.applied():
        assert (net[1].weight.data().asnumpy() == 2).all()
    assert (net[1].weight.data().asnumpy() == 3).all()
    again = gp.ExponentialMovingAverage(net, decay=0.5)
    again.restore(average.state())
    with again.applied():
        assert (net[1].weight.data().asnumpy() == 2).all()


def test_float16_weights_are_averaged_in_float32():
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.cast("float16")
    net.initialize()
    average = gp.ExponentialMovingAverage(net, decay=0.9999)
    for weight in (1.0, *[2.0] * 50):
        net.weight.set_data(nd.array([[weight]], dtype="float16"))
        average.update()
    wanted = 2 - 0.9999**50  # in float16, 1 + 0.0001 would stay 1
    kept = average.state().arrays["parameters/weight"]
    assert kept.dtype == np.float32 and kept.item() == pytest.approx(wanted, rel=1e-6)
    with average.applied():
        assert net.weight.data().dtype == np.float16
        assert net.weight.data().asnumpy().item() == np.float16(wanted)


@pytest.mark.parametrize(("num_devices", "accumulate", "added"), [(2, 1, False), (1, 3, False), (2, 3, True)])
def test_it_continues_bit_for_bit_from_a_checkpoint(tmp_path, num_devices, accumulate, added):
    def begin():
        net, trainer, step = make(num_devices, accumulate=accumulate)
        return net, trainer, step, gp.ExponentialMovingAverage(net, trainer, 0.8, warmup=True)

    net, trainer, step, average = begin()
    train(step, average, range(4))
    step.update()  # of what is accumulated
    if added:
        average.update()
    path = gp.checkpoint.save(tmp_path / "state.npz", net, trainer, epoch=4, average=average)
    train(step, average, range(4, 9))
    again, again_trainer, again_step, again_average = begin()
    assert gp.checkpoint.load(path, again, again_trainer, average=again_average) == {"epoch": 4}
    train(again_step, again_average, range(4, 9))
    assert again_average.num_updates == average.num_updates
    wanted = averages(net, average)
    for name, value in averages(again, again_average).items():
        np.testing.assert_array_equal(value, wanted[name], err_msg=name)


def test_it_loads_on_other_devices_and_without_a_trainer(tmp_path):
    net, trainer, step = make(2)
    average = gp.ExponentialMovingAverage(net, trainer, 0.8)
    train(step, average, range(4))
    path = gp.checkpoint.save(tmp_path / "state.npz", net, trainer, average=average)
    other, _, _ = make(3)
    loaded = gp.ExponentialMovingAverage(other)
    gp.checkpoint.load(path, other, average=loaded)
    wanted = averages(net, average)
    for name, value in averages(other, loaded).items():
        for copy in value:  # of running statistics, which differ between devices, the mean
            np.testing.assert_allclose(copy, wanted[name].mean(axis=0), rtol=1e-12, atol=1e-15, err_msg=name)
    assert gp.checkpoint.load(path, other) == {}  # the rest alone


def test_what_cannot_be_right_is_refused(tmp_path):
    net, trainer, step = make()
    average = gp.ExponentialMovingAverage(net, trainer, 0.8)
    train(step, average, range(2))
    with average.applied():
        for call in (average.update, average.state, lambda: average.applied().__enter__()):
            with pytest.raises(RuntimeError, match=r"inside average.applied\(\)"):
                call()
    before = values(net)
    with pytest.raises(RuntimeError, match="updated the net inside"):
        with average.applied():
            step(*batch(7))
    for name, value in values(net).items():
        np.testing.assert_array_equal(value, before[name])
    with pytest.raises(ValueError, match="decay is 1, expected 0 or more and less than 1"):
        gp.ExponentialMovingAverage(net, trainer, 1)
    with pytest.raises(ValueError, match="trainer: got a float, expected a gluon.Trainer; write decay="):
        gp.ExponentialMovingAverage(net, 0.9)
    with pytest.raises(gp.errors.CheckpointError, match="0.weight of HybridSequential has no values yet"):
        empty = gluon.nn.HybridSequential()
        empty.add(gluon.nn.Dense(3))
        gp.ExponentialMovingAverage(empty).update()
    path = gp.checkpoint.save(tmp_path / "state.npz", net, trainer, average=average)
    with pytest.raises(gp.errors.CheckpointError, match=r"holds no 'ema' \(those that it has: average\)"):
        gp.checkpoint.load(path, net, ema=average)
    with pytest.raises(gp.errors.CheckpointError, match="average: got a int, expected an object such as gp.Exp"):
        gp.checkpoint.load(path, net, average=3)
    other = layers(2)
    with pytest.raises(gp.errors.CheckpointError, match="the average of another architecture: .*is not in the chec"):
        gp.ExponentialMovingAverage(other).restore(average.state(), source=str(path))
    net.collect_params().reset_ctx([mx.cpu(0), mx.cpu(1)])
    with pytest.raises(gp.errors.DevicesMismatch, match=r"0.weight is on \[cpu\(0\), cpu\(1\)\], its average on \[cpu"):
        average.applied().__enter__()


def test_an_update_of_other_parameters_than_before_counts_too():
    """MXNet's ``num_update`` is that of the parameter that has had most updates."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(1, in_units=1), gluon.nn.Dense(1, in_units=1))
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5})
    average = gp.ExponentialMovingAverage(net, trainer, 0.5)
    for layer in net:
        with mx.autograd.record():
            loss = layer(mx.nd.ones((1, 1)))
        loss.backward()
        trainer.step(1, ignore_stale_grad=True)
        average.update()
    assert average.num_updates == 2
    with average.applied():
        assert [layer.weight.data().asscalar() for layer in net] == [0.5, 0.75]
