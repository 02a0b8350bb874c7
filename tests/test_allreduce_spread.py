"""Sums by MXNet's operators, as on GPUs: the same on CPU devices, with the bytes counted that go to and from each."""

import collections
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.allreduce import allreduce_each, functions, spread
from gluon_parallel.compat.array_types import BFLOAT16
from mxnet import nd

pytestmark = pytest.mark.arithmetic

IS_MEMORY = functions._is_memory


@pytest.fixture(autouse=True, scope="module")
def by_operators():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "_is_memory", lambda arrays: False)
        yield


@pytest.fixture
def in_parts(monkeypatch):
    monkeypatch.setattr(spread, "IN_PARTS_FROM", 0)


@pytest.fixture
def traffic(monkeypatch):
    """Bytes that each device has received and sent so far; MXNet's other operators refuse arrays of several devices."""
    bytes_by = {"received": collections.Counter(), "sent": collections.Counter()}
    copyto = nd.NDArray.copyto

    def counted(array, other):
        target = other if isinstance(other, mx.Context) else other.ctx
        if target != array.ctx:
            size = array.size * np.dtype(array.dtype).itemsize
            bytes_by["received"][target] += size
            bytes_by["sent"][array.ctx] += size
        return copyto(array, other)

    monkeypatch.setattr(nd.NDArray, "copyto", counted)
    return bytes_by


def copies(values, dtype):
    return [nd.array(value, ctx=device, dtype=dtype) for device, value in zip(gp.devices(f"cpu:{len(values)}"), values)]


@pytest.mark.parametrize("parts_from", [0, 1 << 20])
@settings(max_examples=40)
@given(
    num_devices=st.integers(2, 5),
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    dtype=st.sampled_from(["float16", "float32", "float64", "int8", "uint8", "int32", "int64"]),
    seed=st.integers(0, 2**31),
)
def test_every_device_ends_with_the_sum_in_the_order_of_the_devices(parts_from, num_devices, shape, dtype, seed):
    values = (20 * np.random.RandomState(seed).standard_normal((num_devices, *shape))).astype(dtype)
    wide = values.astype("float32") if dtype == "float16" else values
    expected = functools.reduce(np.add, wide).astype(dtype)
    arrays = copies(values, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "IN_PARTS_FROM", parts_from)
        gp.allreduce(arrays)
    for array in arrays:
        assert array.asnumpy().tobytes() == expected.tobytes()


def test_bfloat16_is_added_in_float32_and_rounded_once(in_parts):
    values = np.random.RandomState(0).standard_normal((3, 50))
    arrays = [nd.array(value, ctx=mx.cpu(device)).astype(BFLOAT16) for device, value in enumerate(values)]
    total = nd.array(functools.reduce(np.add, [array.astype("float32").asnumpy() for array in arrays]))
    gp.allreduce(arrays)
    for array in arrays:  # MXNet rounds bfloat16 towards zero
        assert (array.astype("float32") == total.astype(BFLOAT16).astype("float32")).asnumpy().all()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_numpy_arrays_of_any_shape_are_summed(in_parts, shape):
    with mx.util.np_shape(True), mx.util.np_array(True):
        arrays = [mx.np.full(shape, device + 1.5, ctx=mx.cpu(device)) for device in range(3)]
        gp.allreduce(arrays)
        for array in arrays:
            assert array.shape == shape and (array.asnumpy() == 7.5).all()


def test_a_sum_waits_for_its_arrays_and_is_waited_for(in_parts):
    arrays = copies(np.ones((3, 200, 200)), "float32")
    for _ in range(20):
        arrays = [nd.dot(array, array) / 600 for array in arrays]
        gp.allreduce(arrays)
    np.testing.assert_allclose(arrays[1].asnumpy(), 1, rtol=1e-4)


def test_outputs_of_a_convolution_are_summed_whatever_their_layout(in_parts):
    devices = [mx.cpu(0), mx.cpu(1)]
    convolution = mx.gluon.nn.Conv2D(32, 3, in_channels=16)
    convolution.initialize(ctx=devices)
    outputs = [convolution(nd.random.normal(shape=(8, 16, 28, 28), ctx=device)) for device in devices]
    expected = outputs[0].copy().asnumpy() + outputs[1].copy().asnumpy()
    gp.allreduce(outputs)
    for output in outputs:
        np.testing.assert_array_equal(output.asnumpy(), expected)


def test_the_mean_of_gradients_is_that_of_the_sums_in_memory(in_parts, monkeypatch):
    values = np.random.RandomState(4).standard_normal((3, 2, 50))

    def averaged():
        towers = [
            [nd.array(value, ctx=device, dtype="float64") for value in tower]
            for device, tower in zip(gp.devices("cpu:3"), values)
        ]
        return [[gradient.asnumpy().tolist() for gradient in tower] for tower in gp.average_gradients(towers)]

    found = averaged()
    monkeypatch.undo()  # also of the fixture's, whose arrays were not in memory
    assert found == averaged()


# ---------------------------------------------------------------------- traffic


@pytest.mark.parametrize("num_devices", [2, 3, 4, 8])
def test_of_one_large_array_no_device_receives_or_sends_more_than_it_must(num_devices, traffic):
    arrays = [nd.ones((300, 1001), ctx=mx.cpu(device)) for device in range(num_devices)]
    gp.allreduce(arrays)
    assert (arrays[-1].asnumpy() == num_devices).all()
    least = 2 * (num_devices - 1) / num_devices * arrays[0].size * 4
    for way in traffic.values():
        assert len(way) == num_devices
        assert max(way.values()) <= least + 2 * 4 * num_devices  # an array does not divide evenly


RESNET_LIKE = [(64, 3, 7, 7), (64,), (256, 64), (128, 128, 3, 3), (512,), (2048, 512), (1000, 2048), (1000,)] * 3


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_of_many_arrays_no_device_receives_or_sends_more_than_it_must(num_devices, traffic):
    lists = [[nd.ones(shape, ctx=mx.cpu(device)) for device in range(num_devices)] for shape in RESNET_LIKE]
    allreduce_each(lists)
    assert all((arrays[-1].asnumpy() == num_devices).all() for arrays in lists)
    least = 2 * (num_devices - 1) / num_devices * sum(arrays[0].size * 4 for arrays in lists)
    for way in traffic.values():
        assert max(way.values()) <= least + 1000  # buckets do not divide evenly


def test_small_arrays_of_one_call_each_are_added_up_by_all_devices_in_turn(traffic, monkeypatch):
    monkeypatch.setattr(spread, "_loads", collections.defaultdict(collections.Counter))  # other tests leave theirs
    for _ in range(40):
        gp.allreduce([nd.ones(100, ctx=mx.cpu(device)) for device in range(4)])
    for way in traffic.values():
        assert max(way.values()) == min(way.values()) == 40 * 400 * 2 * 3 / 4


def test_arrays_are_put_together_so_that_few_operators_are_launched(monkeypatch):
    lists = [[nd.ones(100 * size, ctx=mx.cpu(device)) for device in range(4)] for size in range(1, 101)]
    invoke, calls = mx.base._LIB.MXImperativeInvokeEx, []
    monkeypatch.setattr(mx.base._LIB, "MXImperativeInvokeEx", lambda *given: calls.append(given) or invoke(*given))
    allreduce_each(lists)
    assert len(calls) < 60  # of which 4 * 3 copy parts, 4 * 3 add, 4 * 4 send the sums: fewer than there are arrays
    assert all((array.asnumpy() == 4).all() for arrays in lists for array in arrays)


@pytest.mark.parametrize("bucket", [0, 100, 1000, 1 << 20])
def test_arrays_of_any_types_and_sizes_are_summed_whatever_is_put_together(monkeypatch, bucket):
    monkeypatch.setattr(spread, "BUCKET", bucket)
    random = np.random.RandomState(bucket)
    dtypes = ["float32", "float16", "int32", "float64", "uint8"] * 8
    values = [random.randint(0, 50, (3, *random.randint(1, 9, random.randint(1, 4)))) for _ in dtypes]
    lists = [copies(value, dtype) for value, dtype in zip(values, dtypes)]
    lists[3:3] = [[nd.full((2, 3), value, ctx=mx.cpu(0)) for value in (1, 2)]]  # two arrays of one device
    values[3:3] = [np.stack([np.full((2, 3), value) for value in (1, 2)])]
    allreduce_each(lists)
    for arrays, value in zip(lists, values):
        for array in arrays:
            np.testing.assert_array_equal(array.asnumpy(), value.sum(0))


# ---------------------------------------------------------------------- training


def train(accumulate, clip):
    devices = gp.devices("cpu:3")
    mx.random.seed(5)
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(9, activation="tanh", in_units=4), mx.gluon.nn.Dense(2, in_units=9))
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.cast("float64")
    trainer = mx.gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.1})
    step = gp.DataParallel(net, mx.gluon.loss.L2Loss(), trainer, accumulate=accumulate, clip_global_norm=clip)
    random = np.random.RandomState(1)
    for _ in range(4):
        x, y = (nd.array(random.standard_normal((7, num)), dtype="float64") for num in (4, 2))
        step(x, y)
    return [
        [array.asnumpy().tolist() for array in parameter.list_data()] for parameter in net.collect_params().values()
    ]


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (2, 0.5)])
def test_training_is_that_with_sums_in_memory_and_all_copies_have_the_same_bits(
    in_parts, monkeypatch, accumulate, clip
):
    found = train(accumulate, clip)
    monkeypatch.setattr(functions, "_is_memory", IS_MEMORY)
    for copies, expected in zip(found, train(accumulate, clip)):
        # The norm of the gradients is float32, in which one more bit of a gradient may be seen.
        np.testing.assert_allclose(copies, expected, rtol=1e-5, atol=1e-7)
        assert all(weights == copies[0] for weights in copies)
