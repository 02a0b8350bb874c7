import ctypes
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import native
from gluon_parallel.allreduce import allreduce_each, copy_sums
from gluon_parallel.mxnet import engine
from gluon_parallel.mxnet.compat.array_types import BFLOAT16
from gluon_parallel.native.records import C
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
    # order of three terms, of size 1
    np.testing.assert_allclose(arrays[0].asnumpy(), values.sum(0), rtol=1e-15, atol=2e-15)
    assert len({array.asnumpy().tobytes() for array in arrays}) == 1


@pytest.mark.parametrize(("dtype", "large"), [("float16", 2048), (BFLOAT16, 256)])
def test_halves_are_rounded_once_to_the_nearest(dtype, large):
    arrays = [array.astype(dtype) for array in _copies([[large], [0.75], [0.75]], "float32")]
    gp.allreduce(arrays)  # large + 0.75 is large in this type, twice over; so is large + 1.5 cut off
    assert [array.astype("float32").asscalar() for array in arrays] == [large + 2] * 3


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


@pytest.mark.parametrize("in_memory", [True, False])
def test_average_gradients_is_the_mean_per_parameter(monkeypatch, in_memory):
    if not in_memory:
        monkeypatch.setattr(copy_sums, "_is_memory", lambda arrays: False)
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


def test_the_callers_list_may_be_refilled_at_once():
    expected, kept, refilled = [], [], [None, None]
    for value in range(100):
        refilled[:] = [nd.full((50, 50), value, ctx=device) for device in gp.devices("cpu:2")]
        kept.append(refilled[1])
        expected.append(2 * value)
        gp.allreduce(refilled)
    assert [array[0, 0].asscalar() for array in kept] == expected


# ---------------------------------------------------------------------- what is refused, before anything is changed


@pytest.fixture
def layers():
    """Weights and gradients of two layers on three devices; a backward pass has run on the first two."""
    net = mx.gluon.nn.Sequential(prefix="net_")
    with net.name_scope():
        net.add(mx.gluon.nn.Dense(2, in_units=2), mx.gluon.nn.Dense(2, in_units=2))
    net.initialize(ctx=gp.devices("cpu:3"))
    with autograd.record():
        outputs = [net(nd.ones((1, 2), ctx=device)) for device in gp.devices("cpu:3")[:2]]
    autograd.backward(outputs)
    yield [(layer.weight.list_data(), layer.weight.list_grad()) for layer in net]  # the net must live as long


def on(device, shape=(2, 3), **options):
    made.append(nd.ones(shape, ctx=mx.cpu(device), **options))
    return made[-1]


made: list = []  # by `on`
PER_DEVICE = r"expected one list per device: \[\[parameter.grad\(device\)"
SUM_OR_COPY = {
    r"arrays\[2\] on cpu\(1\) has shape \(3, 2\).*\(2, 3\)": lambda: [on(0), on(2), on(1, (3, 2))],
    r"arrays\[2\] on cpu\(1\) has dtype float64.*float32": lambda: [on(0), on(2), on(1, dtype="float64")],
    r"arrays\[2\] on cpu\(1\) has stype row_sparse.*default": lambda: [on(0), on(2), on(1).tostype("row_sparse")],
    "same array": lambda: [on(0)] * 2,
    r"arrays\[1\] is on cpu\(0\), as arrays\[0\] is; .*gp\.(allreduce\(.*list_grad|broadcast\(.*list_data)\(\)": (
        lambda: [*on(0)]
    ),
    "empty list; expected": list,
    "expected a list of NDArrays, one per device, got NDArray": lambda: on(0),
    "expected a list of NDArrays, one per device, got NoneType": lambda: None,
    r"arrays\[0\]: expected an NDArray, got numpy.ndarray; write": lambda: [np.ones(3)],
}
TOWERS = {
    r"gradients of parameter 1\[1\].*shape \(4,\)": lambda: [[on(0, 2), on(0, 3)], [on(1, 2), on(1, 4)]],
    r"\[1\] holds 1 gradients, but tower_grads\[0\] holds 2": lambda: [[on(0, 2), on(0, 3)], [on(1, 2)]],
    "got tuple; pass the gradients alone": lambda: [[(on(0, 2), "weight")]],
    rf"gradients on several devices; {PER_DEVICE}": lambda: [[on(0, 2), on(1, 2)]],
    rf"parameter 0\[1\] is on cpu\(0\), as .*{PER_DEVICE}": lambda: [[on(0, 2)], [on(0, 2)]],
    rf"several devices; {PER_DEVICE}.*": lambda: [[on(0, 2), on(1, 2)], [on(0, 2), on(1, 2)]],
    "empty list": list,
}
# Of (weights, gradients) of two layers.
OF_PARAMETERS = [
    (gp.allreduce, r"gradient of net_dense0_weight is given on cpu\(0\), but not on cpu\(1\); .*gp.allreduce",
     lambda one, two: one[1][:1]),
    (gp.average_gradients, r"parameter 0: .* not on cpu\(1\); expected one list per device",
     lambda one, two: [[one[1][0], two[1][0]]]),
    (gp.broadcast, r"\[1\] is the value of net_dense1_weight, but .*\[0\] the value of net_dense0_weight; .*gp.br",
     lambda one, two: [one[0][0], two[0][1], one[0][2]]),
    (gp.broadcast, r"the value of net_dense0_weight .* not on cpu\(1\), cpu\(2\)", lambda one, two: one[0][:1]),
    (gp.allreduce, "is the value of net_dense0_w.* the gradient of net_dense0_w",
     lambda one, two: [one[1][0], *one[0][1:]]),
    (gp.allreduce, r"\[1\] is the gradient of net_dense1_weight, .* gradient of net_dense0_w",
     lambda one, two: [one[1][0], two[1][1]]),
    (gp.average_gradients, r"parameter 0\[1\] is the gradient of net_dense1_weight",
     lambda one, two: [[one[1][0], two[1][0]], [two[1][1], one[1][1]]]),
]  # fmt: skip
REFUSED = [(function, *case) for function in (gp.allreduce, gp.broadcast) for case in SUM_OR_COPY.items()]
REFUSED = [*REFUSED, *((gp.average_gradients, *case) for case in TOWERS.items())]
REFUSED = [*((function, message, lambda *_, make=make: make()) for function, message, make in REFUSED), *OF_PARAMETERS]


@pytest.mark.parametrize(("function", "message", "make"), REFUSED)
def test_what_is_no_copies_of_one_array_or_no_tower_per_device_is_refused_unchanged(layers, function, message, make):
    made.clear()
    arrays = make(*layers)
    everything = [*made, *itertools.chain(*itertools.chain(*layers))]
    before = [array.asnumpy().tolist() for array in everything]
    with pytest.raises(gp.errors.ArrayMismatch, match=message):
        function(arrays)
    assert [array.asnumpy().tolist() for array in everything] == before


def test_a_device_on_which_nothing_has_run_may_be_left_out(layers):
    gradients = layers[0][1]
    before = gradients[0].asnumpy()
    gp.allreduce(gradients[:2])
    np.testing.assert_array_equal(gradients[0].asnumpy(), 2 * before)


# ---------------------------------------------------------------------- by MXNet, as on GPUs


@pytest.fixture(params=["store", "operators"])
def by_mxnet_alone(request, monkeypatch):
    """Sums of CPU devices by MXNet's store, as of GPUs, or by its operators, as of what that store does not take."""
    monkeypatch.setattr(copy_sums, "_is_memory", lambda arrays: False)
    if request.param == "store":
        monkeypatch.setattr(copy_sums, "_are_of_gpus", lambda arrays: len({array.ctx for array in arrays}) > 1)


@pytest.mark.parametrize("num_devices", [2, 5])
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


@pytest.mark.parametrize("frees", [False, True])
def test_a_sum_that_the_engine_refuses_frees_its_handles_once(monkeypatch, frees):
    """Whether MXNet has freed them, which depends on where it has failed, or not."""
    arrays = _copies(np.ones((3, 5)), "float32")
    sums, made, freed = copy_sums.CopySums([arrays], are_plain=True), [], []
    mxnet, external = mx.base._LIB, C.External.in_dll(native.library(), "gp_external")

    def copied(handle, place):
        made.append(place)
        return mxnet.MXShallowCopyNDArray(ctypes.c_void_p(handle), ctypes.c_void_p(place))

    def refused(_function, parameter, free, *_):
        if frees:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(free)(parameter)
        return -1

    def free(handle):
        freed.append(handle)
        return mxnet.MXNDArrayFree(ctypes.c_void_p(handle))

    pointer, number = ctypes.c_void_p, ctypes.c_int
    replaced = {
        "MXShallowCopyNDArray": ctypes.CFUNCTYPE(number, pointer, pointer)(copied),
        "MXEnginePushSyncND": ctypes.CFUNCTYPE(number, *[pointer] * 11)(refused),
        "MXNDArrayFree": ctypes.CFUNCTYPE(number, pointer)(free),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(external, name, ctypes.cast(function, pointer).value)
    assert copy_sums.push_sums(sums.records[0], 0) == -1
    assert len(made) == len(freed) == len({*freed}) == 3
