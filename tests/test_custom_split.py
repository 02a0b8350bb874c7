"""``split=`` of a step: its shards are trained on as they are, or refused with the numbers of samples."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

DEVICES = gp.devices("cpu:2")
ROWS = np.random.RandomState(0).standard_normal((6, 2)).astype("float32")


def part(data, rows, device):
    """These rows of a nested batch, on a device."""
    if isinstance(data, (list, tuple)):
        return tuple(part(one, rows, device) for one in data)
    return data[rows].as_in_context(device)


def places(*parts):
    """A split that puts rows on devices: pairs (begin, end), number of the device."""
    return lambda data, devices: [part(data, slice(*rows), mx.cpu(number)) for rows, number in parts]


def made(split):
    net = gluon.nn.Dense(1, in_units=2, use_bias=False)
    net.initialize(mx.init.One(), ctx=DEVICES)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    return net, gp.DataParallel(net, gluon.loss.L2Loss(), trainer, split=split)


SINGLES = [nd.array(row[None]) for row in ROWS]


@pytest.mark.parametrize(
    ("message", "split"),
    [
        ("6 samples came in and 4 came out, in shards of 2, 2", places(((0, 2), 0), ((4, 6), 1))),
        ("6 samples came in and 12 came out", places(((0, 6), 0), ((0, 6), 1))),
        ("got 3 shards for the 6 samples of a batch on 2 devices", places(((0, 2), 0), ((2, 4), 1), ((4, 6), 1))),
        ("got 0 shards", places()),
        ("got a NoneType", lambda data, devices: None),
        (r"shards are on \[cpu\(0\), cpu\(0\)\]", places(((0, 3), 0), ((3, 6), 0))),
        (r"shards are on \[cpu\(0\), cpu\(5\)\]", places(((0, 3), 0), ((3, 6), 5))),
        ("shard 0 is a NDArray; expected a pair", lambda data, devices: gp.split_and_load(data[0][0], devices)),
        (r"shard 0 is \['NDArray', 'NDArray'\]", lambda data, on: gp.split_and_load((data[0][0], data[1][0]), on)),
    ],
)
def test_shards_that_are_not_the_batch_are_refused_and_nothing_is_updated(message, split):
    net, step = made(split)
    with pytest.raises(gp.errors.BatchMismatch, match=message):
        step(nd.array(ROWS), nd.zeros((6, 1)))
    assert all((array.asnumpy() == 1).all() for array in net.weight.list_data())


def test_a_list_of_arrays_of_one_sample_each_is_one_sample():
    def split(data, devices):
        return [((nd.concat(*data[0][number::2], dim=0).as_in_context(on),), (nd.zeros((3, 1), ctx=on),))
                for number, on in enumerate(devices)]  # fmt: skip

    _, step = made(split)
    with pytest.raises(gp.errors.BatchMismatch, match=r"1 sample came in and 6 came out, in shards of 3, 3.*stack"):
        step(SINGLES, nd.zeros((1, 1)))


@pytest.mark.parametrize("split", [places(((4, 6), 1), ((0, 4), 0)), places(((0, 6), 1))], ids=["turned", "one idle"])
def test_devices_in_any_order_or_without_a_shard_train_as_one_device(split):
    wanted = 1 - 0.1 * ROWS.astype(float).T @ ROWS.sum(axis=1, dtype=float) / len(ROWS)
    net, step = made(split)
    step(nd.array(ROWS), nd.zeros((6, 1)))
    for weight in net.weight.list_data():
        np.testing.assert_allclose(weight.asnumpy()[0], wanted, rtol=1e-5, atol=1e-6)  # float32
