import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import engine
from gluon_parallel.allreduce import allreduce_each, by_mxnet, copy_sums
from gluon_parallel.compat.array_types import BFLOAT16
from mxnet import autograd, nd

pytestmark = pytest.mark.arithmetic

DTYPES = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64"]


def _copies(arrays, dtype):
    return [nd.array(array, ctx=device, dtype=dtype) for device, array in zip(gp.devices(f"cpu:{len(arrays)}"), arrays)]


@settings(deadline=None, max_examples=60)
@given(
    num_devices=st.integers(1, 5),
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_every_device_ends_with_the_sum(num_devices, shape, dtype, seed):
    values = np.random.RandomState(seed).randint(0, 25, size=[num_devices, *shape])  # sums are exact in every dtype
    arrays = _copies(values, dtype)
    gp.allreduce(arrays)
    for array in arrays:
        assert array.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(array.asnumpy(), values.sum(0).astype(dtype))


def test_arrays_larger_than_a_block_are_summed_to_their_last_element():
    values = np.random.RandomState(1).standard_normal((3, 100_003))
    arrays = _copies(values, "float64")
    gp.allreduce(arrays)
    for array in arrays:
        # order of three terms, of size 1
        np.testing.assert_allclose(array.asnumpy(), values.sum(0), rtol=1e-15, atol=2e-15)


def test_all_devices_end_with_the_same_bits():
    arrays = _copies(np.random.RandomState(2).standard_normal((5, 1000)), "float32")
    gp.allreduce(arrays)
    assert len({array.asnumpy().tobytes() for array in arrays}) == 1


def test_half_precision_is_rounded_once():
    arrays = _copies([[2048.0], [0.75], [0.75]], "float16")  # 2048 + 0.75 is 2048 in half precision, twice over
    gp.allreduce(arrays)
    assert arrays[0].asscalar() == 2050  # 2049.5, rounded to a multiple of 2


def test_bfloat16_is_rounded_once_to_the_nearest():
    arrays = [array.astype(BFLOAT16) for array in _copies([[256.0], [0.75], [0.75]], "float32")]
    gp.allreduce(arrays)  # 256 + 0.75 is 256 in bfloat16, twice over; so is 257.5 cut off
    assert [array.astype("float32").asscalar() for array in arrays] == [258] * 3


def test_the_sum_waits_for_what_is_still_being_computed_and_is_waited_for():
    arrays = _copies(np.ones((2, 300, 300)), "float32")
    for _ in range(50):
        arrays = [nd.dot(array, array) / 600 for array in arrays]
        gp.allreduce(arrays)
    np.testing.assert_allclose(arrays[1].asnumpy(), 1, rtol=1e-4, atol=1e-6)


def test_outputs_of_a_convolution_are_summed_whatever_their_layout():
    devices = gp.devices("cpu:2")
    convolution = mx.gluon.nn.Conv2D(32, 3, in_channels=16)
    convolution.initialize(ctx=devices)
    outputs = [convolution(nd.random.normal(shape=(8, 16, 28, 28), ctx=device)) for device in devices]
    expected = outputs[0].copy().asnumpy() + outputs[1].copy().asnumpy()
    gp.allreduce(outputs)
    for output in outputs:
        np.testing.assert_allclose(output.asnumpy(), expected, rtol=1e-6, atol=1e-6)  # float32 of size 1, near 0 too


def test_row_sparse_gradients_are_summed():
    rows = [([[1.0, 2.0]], [0]), ([[10.0, 20.0], [3.0, 4.0]], [0, 2])]
    arrays = [
        nd.sparse.row_sparse_array((np.array(values, "float32"), index), shape=(4, 2), ctx=mx.cpu(device))
        for device, (values, index) in enumerate(rows)
    ]
    gp.allreduce(arrays)
    for array in arrays:
        assert array.stype == "row_sparse"
        assert array.asnumpy().tolist() == [[11, 22], [0, 0], [3, 4], [0, 0]]


def test_under_record_nothing_is_recorded():
    arrays = _copies(np.ones((2, 3, 3)), "float32")
    for array in arrays:
        array.attach_grad()
    with mx.autograd.record():
        loss = (arrays[0] * 2).sum()
        gp.allreduce([array.grad for array in arrays])
    loss.backward()
    assert (arrays[0].grad.asnumpy() == 2).all()


def test_broadcast_gives_everyone_the_first_ones_values():
    values = np.random.RandomState(3).standard_normal((4, 5, 6))
    arrays = _copies(values, "float64")
    gp.broadcast(arrays)
    for array in arrays:
        np.testing.assert_array_equal(array.asnumpy(), values[0])


def test_average_gradients_is_the_mean_per_parameter():
    random = np.random.RandomState(4)
    shapes = [(3, 2), (5,), (2, 2, 2)]
    values = [[random.standard_normal(shape) for shape in shapes] for _ in range(3)]
    devices = gp.devices("cpu:3")
    towers = [[nd.array(value, ctx=devices[d], dtype="float64") for value in values[d]] for d in range(3)]
    averaged = gp.average_gradients(towers)
    for tower in averaged:
        for index, gradient in enumerate(tower):
            expected = sum(values[d][index] for d in range(3)) / 3
            np.testing.assert_allclose(gradient.asnumpy(), expected, rtol=1e-14, atol=1e-15)  # a few roundings
    assert averaged[0][0] is towers[0][0]


@pytest.mark.parametrize(
    ("other", "aspect"),
    [
        (lambda: nd.ones((3, 2), ctx=mx.cpu(1)), r"shape \(3, 2\).*\(2, 3\)"),
        (lambda: nd.ones((2, 3), ctx=mx.cpu(1), dtype="float64"), "dtype float64.*float32"),
        (lambda: nd.ones((2, 3), ctx=mx.cpu(1)).tostype("row_sparse"), "stype row_sparse.*default"),
    ],
)
@pytest.mark.parametrize("function", [gp.allreduce, gp.broadcast])
def test_arrays_that_differ_are_refused_before_anything_is_changed(function, other, aspect):
    arrays = [nd.ones((2, 3)), nd.ones((2, 3), ctx=mx.cpu(2)), other()]
    with pytest.raises(gp.errors.ArrayMismatch, match=rf"arrays\[2\] on cpu\(1\) has {aspect}"):
        function(arrays)
    assert (arrays[0].asnumpy() == 1).all() and (arrays[1].asnumpy() == 1).all()


def test_towers_that_differ_are_refused_before_anything_is_changed():
    towers = [[nd.ones(2), nd.ones(3)], [nd.ones(2, ctx=mx.cpu(1)), nd.ones(4, ctx=mx.cpu(1))]]
    with pytest.raises(gp.errors.ArrayMismatch, match=r"gradients of parameter 1\[1\].*shape \(4,\)"):
        gp.average_gradients(towers)
    assert towers[0][0].asnumpy().tolist() == [1, 1]
    with pytest.raises(gp.errors.ArrayMismatch, match=r"\[1\] holds 1 gradients, but tower_grads\[0\] holds 2"):
        gp.average_gradients([[nd.ones(2), nd.ones(3)], [nd.ones(2)]])


@pytest.mark.parametrize("bad", [[], nd.ones(3), [np.ones(3)], None])
def test_what_is_not_a_list_of_arrays_is_refused(bad):
    with pytest.raises(gp.errors.ArrayMismatch, match="expected"):
        gp.allreduce(bad)


def test_pairs_of_gradient_and_variable_are_refused_with_what_to_pass():
    gradient = mx.nd.ones(2)
    with pytest.raises(gp.errors.ArrayMismatch, match="got tuple; pass the gradients alone"):
        gp.average_gradients([[(gradient, "weight")]])


def test_the_same_array_twice_is_refused():
    array = nd.ones(3)
    with pytest.raises(gp.errors.ArrayMismatch, match="same array"):
        gp.allreduce([array, array])


def test_the_callers_list_may_be_refilled_at_once():
    expected, kept, refilled = [], [], [None, None]
    for value in range(100):
        refilled[:] = [nd.full((50, 50), value, ctx=device) for device in gp.devices("cpu:2")]
        kept.append(refilled[1])
        expected.append(2 * value)
        gp.allreduce(refilled)
    assert [array[0, 0].asscalar() for array in kept] == expected


@pytest.mark.parametrize(
    ("function", "remedy"), [(gp.allreduce, r"allreduce\(.*list_grad"), (gp.broadcast, r"broadcast\(.*list_data")]
)
def test_two_arrays_of_one_device_are_refused(function, remedy):
    whole = nd.arange(8).reshape((2, 4))
    wanted = rf"arrays\[1\] is on cpu\(0\), as arrays\[0\] is; .*gp\.{remedy}\(\)"
    with pytest.raises(gp.errors.ArrayMismatch, match=wanted):
        function([whole[0], whole[1]])
    assert whole.asnumpy().tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(("num", "num_devices"), [(2, 1), (1, 2), (2, 2)])
def test_towers_that_are_lists_of_one_parameter_each_are_refused(num, num_devices):
    devices = gp.devices(f"cpu:{num_devices}")
    towers = [[nd.full(2, number, ctx=device) for device in devices] for number in range(num)]
    wanted = r"expected one list per device: \[\[parameter.grad\(device\)"
    with pytest.raises(gp.errors.ArrayMismatch, match=wanted):
        gp.average_gradients(towers)
    assert [tower[0].asnumpy().tolist() for tower in towers] == [[0, 0], [1, 1]][:num]


@pytest.fixture
def two_layers():
    net = mx.gluon.nn.Sequential(prefix="net_")
    with net.name_scope():
        net.add(mx.gluon.nn.Dense(2, in_units=2), mx.gluon.nn.Dense(2, in_units=2))
    net.initialize(ctx=gp.devices("cpu:3"))
    return net


def test_a_copy_that_would_be_left_out_of_a_sum_is_refused(two_layers):
    devices, weights = gp.devices("cpu:3"), [two_layers[0].weight, two_layers[1].weight]
    with autograd.record():
        outputs = [two_layers(nd.ones((1, 2), ctx=device)) for device in devices[:2]]
    autograd.backward(outputs)
    towers = [[weight.grad(device) for weight in weights] for device in devices]
    before = [gradient.asnumpy().tolist() for gradient in itertools.chain(*towers)]
    left_out = r"the gradient of net_dense0_weight is given on cpu\(0\), but not on cpu\(1\); .*gp.allreduce"
    with pytest.raises(gp.errors.ArrayMismatch, match=left_out):
        gp.allreduce(towers[0][:1])
    with pytest.raises(gp.errors.ArrayMismatch, match=r"parameter 0: .* not on cpu\(1\); expected one list per device"):
        gp.average_gradients(towers[:1])
    assert [gradient.asnumpy().tolist() for gradient in itertools.chain(*towers)] == before
    gp.allreduce([tower[0] for tower in towers[:2]])  # nothing has run on the third device
    np.testing.assert_array_equal(towers[0][0].asnumpy(), 2 * np.array(before[0]))


def test_weights_of_two_parameters_are_not_broadcast_as_one(two_layers):
    first, second = two_layers[0].weight.list_data(), two_layers[1].weight.list_data()
    wanted = r"\[1\] is the value of net_dense1_weight, but .*\[0\] the value of net_dense0_weight; .*gp.broadcast"
    with pytest.raises(gp.errors.ArrayMismatch, match=wanted):
        gp.broadcast([first[0], second[1], first[2]])
    with pytest.raises(gp.errors.ArrayMismatch, match=r"the value of net_dense0_weight .* not on cpu\(1\), cpu\(2\)"):
        gp.broadcast(first[:1])
    with pytest.raises(gp.errors.ArrayMismatch, match="is the value of net_dense0_w.* the gradient of net_dense0_w"):
        gp.allreduce([two_layers[0].weight.list_grad()[0], *first[1:]])


def test_gradients_of_two_parameters_are_not_mixed(two_layers):
    net = two_layers
    first, second = net[0].weight.list_grad(), net[1].weight.list_grad()
    with pytest.raises(
        gp.errors.ArrayMismatch, match=r"\[1\] is the gradient of net_dense1_weight, .* gradient of net_dense0_w"
    ):
        gp.allreduce([first[0], second[1]])
    with pytest.raises(gp.errors.ArrayMismatch, match=r"parameter 0\[1\] is the gradient of net_dense1_weight"):
        gp.average_gradients([[first[0], second[0]], [second[1], first[1]]])


# ---------------------------------------------------------------------- by MXNet, as on GPUs


@pytest.fixture(params=["store", "operators"])
def by_mxnet_alone(request, monkeypatch):
    """Sums of CPU devices by MXNet's store, as of GPUs, or by its operators, as of what that store does not take."""
    monkeypatch.setattr(copy_sums, "_is_memory", lambda arrays: False)
    if request.param == "store":
        monkeypatch.setattr(by_mxnet, "_are_of_gpus", lambda arrays: len({array.ctx for array in arrays}) > 1)


@pytest.mark.parametrize("num_devices", [2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mxnet_adds_in_the_order_of_the_devices_and_rounds_halves_once(by_mxnet_alone, dtype, num_devices):
    values = (20 * np.random.RandomState(num_devices).standard_normal((num_devices, 4, 5))).astype(dtype)
    expected = functools.reduce(np.add, values.astype("float32") if dtype == "float16" else values).astype(dtype)
    for _ in range(2):
        arrays = _copies(values, dtype)
        gp.allreduce(arrays)
        for array in arrays:
            assert array.asnumpy().tobytes() == expected.tobytes()


def test_mxnet_adds_bfloat16_in_float32(by_mxnet_alone):
    values = np.random.RandomState(0).standard_normal((3, 50))
    arrays = [nd.array(value, ctx=mx.cpu(device)).astype(BFLOAT16) for device, value in enumerate(values)]
    total = nd.array(functools.reduce(np.add, [array.astype("float32").asnumpy() for array in arrays]))
    gp.allreduce(arrays)
    for array in arrays:  # MXNet rounds bfloat16 towards zero
        assert (array.astype("float32") == total.astype(BFLOAT16).astype("float32")).asnumpy().all()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_mxnet_adds_numpy_arrays_of_any_shape(by_mxnet_alone, shape):
    with mx.util.np_shape(True), mx.util.np_array(True):
        arrays = [mx.np.full(shape, device + 1.5, ctx=mx.cpu(device)) for device in range(3)]
        gp.allreduce(arrays)
        for array in arrays:
            assert array.shape == shape and (array.asnumpy() == 7.5).all()


def test_mxnets_sum_waits_for_its_arrays_and_is_waited_for_whatever_their_layout(by_mxnet_alone):
    test_outputs_of_a_convolution_are_summed_whatever_their_layout()
    test_the_sum_waits_for_what_is_still_being_computed_and_is_waited_for()


def test_mxnet_adds_many_arrays_of_any_types_and_sizes_at_once(by_mxnet_alone):
    random = np.random.RandomState(0)
    dtypes = ["float32", "float16", "int32", "float64", "uint8"] * 8
    values = [random.randint(0, 50, (3, *random.randint(1, 9, random.randint(1, 4)))) for _ in dtypes]
    lists = [_copies(value, dtype) for value, dtype in zip(values, dtypes)]
    lists[3:3] = [[nd.full((2, 3), value, ctx=mx.cpu(0)) for value in (1, 2)]]  # two arrays of one device
    values[3:3] = [np.stack([np.full((2, 3), value) for value in (1, 2)])]
    for _ in range(2):
        allreduce_each(lists)
    for arrays, value in zip(lists, values):
        for array in arrays:
            np.testing.assert_array_equal(array.asnumpy(), (value.sum(0) * len(arrays)).astype(array.dtype))


def test_mxnets_mean_of_gradients_is_that_in_memory(by_mxnet_alone, monkeypatch):
    values = np.random.RandomState(4).standard_normal((3, 2, 50))

    def averaged(dtype):
        devices = gp.devices("cpu:3")
        towers = [[nd.array(one, device, dtype) for one in tower] for device, tower in zip(devices, values)]
        return [[gradient.asnumpy().tolist() for gradient in tower] for tower in gp.average_gradients(towers)]

    found = [averaged("float64"), averaged("float16")]
    monkeypatch.undo()
    assert found == [averaged("float64"), averaged("float16")]


def test_arrays_of_a_sum_may_be_dropped_before_it_has_begun():
    totals = []
    for number in range(50):
        arrays = [nd.random.uniform(shape=(300_000,), ctx=mx.cpu(device)) for device in range(2)]
        gp.allreduce(arrays)
        if number % 10 == 0:
            totals.append((arrays[0] - arrays[1]).sum())
        del arrays
    assert [total.asscalar() for total in totals] == [0] * 5


def test_a_sum_of_an_array_that_has_failed_fails():
    arrays = [nd.ones(3), nd.ones(3, ctx=mx.cpu(1))]
    engine.fail(arrays[1:], ValueError("on purpose"))
    gp.allreduce(arrays)
    with pytest.raises(ValueError, match="on purpose"):
        arrays[0].asnumpy()


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_the_priority_of_a_sum_reaches_the_engine(monkeypatch, dtype):
    found = []
    monkeypatch.setattr(copy_sums, "push_sums", lambda _record, priority: found.append(priority) or 0)
    monkeypatch.setattr(copy_sums, "push", lambda *_, priority, **__: found.append(priority))
    gp.allreduce([nd.ones(2, ctx=mx.cpu(device), dtype=dtype) for device in range(2)], priority=7)
    assert found == [7]
