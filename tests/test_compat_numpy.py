"""NumPy's scalars are parameters of MXNet, and MXNet's arrays are arguments of NumPy, whichever NumPy this is."""

import numpy as np
import pytest

import mxnet as mx
from gluon_parallel.mxnet.compat import numpy_protocol
from gluon_parallel.mxnet.compat.scalars import plain, text
from mxnet import gluon, nd, sym

INT, FLOAT, TRUE = np.int64, np.float32, np.bool_(True)
CUBE = nd.arange(24).reshape((2, 3, 4))  # (2, 3, 4)
IMAGE = nd.ones((1, 3, 8, 8))


def output(block, data):
    """What the block computes, called as it is and hybridized, which writes its parameters in two ways."""
    block.initialize(mx.init.One())
    imperative = block(data).asnumpy()
    block.hybridize()
    return [imperative, block(data).asnumpy()]


def constant(value):
    return gluon.nn.Dense(3, weight_initializer=mx.init.Constant(value))


def hybridized(flag):
    net = gluon.nn.Dense(3)
    net.hybridize(static_alloc=flag)
    return output(net, nd.ones((2, 5)))


def assigned(key, value):
    array = CUBE.copy()
    array[key] = value
    return array


def updated(lr, wd, num):
    return nd.multi_sgd_update(nd.ones(3), nd.ones(3), out=nd.ones(3), lrs=[lr], wds=(wd,), num_weights=num)


def convolution(size, channels, lr_mult):
    data = sym.var("x", shape=(size - 2, 3, 8, 8), lr_mult=lr_mult)
    return sym.Convolution(data, kernel=[size, size], num_filter=channels).tojson()


# Each function computes something from a kind of integer, of float, and of truth value: Python's or NumPy's.
CASES = {
    "Dense": lambda i, f, b: output(gluon.nn.Dense(i(9) + 1, in_units=i(5)), nd.ones((2, 5))),
    "Dense, deferred": lambda i, f, b: output(gluon.nn.Dense(i(9) + 1), nd.ones((2, 5))),
    "Conv2D": lambda i, f, b: output(gluon.nn.Conv2D(i(4), i(3), i(1), i(1)), IMAGE),
    "Conv2D, tuples": lambda i, f, b: output(gluon.nn.Conv2D(4, (i(3), i(3)), (i(1), i(2)), [i(1), 1]), IMAGE),
    "MaxPool2D": lambda i, f, b: output(gluon.nn.MaxPool2D((i(2), i(2)), i(2)), IMAGE),
    "BatchNorm": lambda i, f, b: output(gluon.nn.BatchNorm(i(1), f(0.5), f(0.25), in_channels=i(3)), IMAGE),
    "Embedding": lambda i, f, b: output(gluon.nn.Embedding(i(10), i(4)), nd.array([1, 2])),
    "LSTM": lambda i, f, b: output(gluon.rnn.LSTM(i(4), i(1), input_size=i(5)), nd.ones((3, 2, 5))),
    "an initializer": lambda i, f, b: output(constant(f(0.5)), nd.ones((2, 5))),
    "hybridize": lambda i, f, b: hybridized(b),
    "zeros": lambda i, f, b: nd.zeros((i(2), i(3))),
    "full": lambda i, f, b: nd.full([i(2)], f(0.5)),
    "empty": lambda i, f, b: nd.empty(i(2)).shape,
    "slice": lambda i, f, b: nd.slice(CUBE, begin=(i(0), None), end=(i(1), i(3))),
    "tile": lambda i, f, b: nd.tile(CUBE, reps=(i(2), i(1))),
    "split_v2": lambda i, f, b: nd.split_v2(CUBE, (i(1), i(2)), axis=i(1)),
    "split_v2 in equal parts": lambda i, f, b: nd.split_v2(CUBE, i(3), axis=1),
    "reshape": lambda i, f, b: nd.reshape(CUBE, shape=(i(6), i(-1))),
    "sum": lambda i, f, b: CUBE.sum(axis=(i(0), i(1)), keepdims=b),
    "assignment": lambda i, f, b: assigned((slice(i(0), i(1)), i(1)), f(3)),
    "multi_sgd_update": lambda i, f, b: updated(f(0.5), f(0), i(1)),
    "MultiBoxPrior": lambda i, f, b: nd.contrib.MultiBoxPrior(IMAGE, sizes=(f(0.5), f(0.2)), ratios=[f(1)]),
    "random.uniform": lambda i, f, b: (mx.random.seed(i(3)), nd.random.uniform(f(0), f(1), shape=(i(2), i(3))))[1],
    "symbols": lambda i, f, b: convolution(i(3), i(4), f(0.5)),
    "a symbol's initializer": lambda i, f, b: sym.var("x", init=mx.init.Xavier(magnitude=f(2.5))).attr("__init__"),
    "mx.np.ones": lambda i, f, b: mx.np.ones([i(2), i(3)]),
    "mx.np.full": lambda i, f, b: mx.np.full((i(2), 3), b),
    "mx.np.reshape": lambda i, f, b: mx.np.ones((2, 6)).reshape(i(3), i(4)),
    "mx.np.split": lambda i, f, b: mx.np.split(mx.np.ones((2, 6)), [i(1), i(2)], axis=i(1)),
    "mx.np.pad": lambda i, f, b: mx.np.pad(mx.np.ones((2, 2)), ((i(0), i(1)), (i(1), i(0)))),
    "mx.np.linalg.norm": lambda i, f, b: mx.np.linalg.norm(mx.np.ones((2, 2)), axis=i(0)),
    "mx.np.random.normal": lambda i, f, b: (mx.npx.random.seed(i(3)), mx.np.random.normal(f(0), f(1), size=i(4)))[1],
}  # fmt: skip


def values(result):
    """The result as nested lists of Python's numbers."""
    if isinstance(result, (list, tuple)):
        return [values(item) for item in result]
    return result if isinstance(result, (str, int)) else np.asarray(result).tolist()


@pytest.mark.parametrize("name", CASES)
def test_numpy_scalars_are_parameters_as_pythons_numbers_are(name):
    with mx.name.NameManager():
        expected = values(CASES[name](int, float, True))
    with mx.name.NameManager():
        assert values(CASES[name](INT, FLOAT, TRUE)) == expected


def test_the_text_of_a_number_is_the_shortest_that_is_that_number_and_other_values_stay():
    assert text((FLOAT(0.1), np.float64(0.1), INT(3), TRUE, None)) == "(0.1, 0.1, 3, True, None)"
    assert text("np.int64(3)") == "np.int64(3)"
    assert text([(INT(1), (INT(2),))]) == "[(1, (2,))]"
    array, shape = nd.ones(2), (2, [3, "a"])
    assert plain(array) is array and plain(shape) == shape and plain((array,))[0] is array


# ---- arrays ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [nd, mx.np])
def test_numpys_functions_read_the_values_of_an_array_of_mxnet(module):
    one, square = module.ones((1,)), module.ones((2, 2))
    assert np.array_equal(square, square)
    assert np.allclose(square, np.ones((2, 2)))
    assert np.asarray(one).tolist() == [1.0]
    assert np.array([one, one], dtype="float64").dtype == np.float64
    assert np.all(module.array([50000001], dtype="int32") == 50000001) and not np.all(module.array([1, 2]) == 2)
    assert type(np.float32(2) * nd.ones(2)) is nd.NDArray
    with pytest.raises(ValueError, match="belongs to MXNet"):
        one.__array__(copy=False)


@pytest.mark.skipif(mx.recordio.cv2 is None, reason="OpenCV is not installed, with which records of images are written")
@pytest.mark.parametrize("lacks", [True, False])
def test_a_record_with_several_labels_is_written_and_read(monkeypatch, lacks):
    if lacks:  # as since NumPy 2.3
        monkeypatch.setattr(mx.recordio, "np", mx.recordio.np)
        monkeypatch.setattr(mx.recordio, "cv2", mx.recordio.cv2)
        numpy_protocol._restore_tostring(mx.recordio)
    labels = mx.recordio.IRHeader(0, [1.0, 2.5], 7, 0)
    header, content = mx.recordio.unpack(mx.recordio.pack(labels, b"data"))
    assert (header.label.tolist(), header.id, content) == ([1.0, 2.5], 7, b"data")
    image = np.arange(300, dtype="uint8").reshape(10, 10, 3)
    header, found = mx.recordio.unpack_img(mx.recordio.pack_img(labels, image, quality=9, img_fmt=".png"))
    assert header.label.tolist() == [1.0, 2.5] and np.array_equal(found, image)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 1, 1)])
def test_the_scalar_of_an_array_of_one_element_is_a_number(shape):
    scalar = nd.full(shape, 0.5).asscalar()
    assert float(scalar) == 0.5 and type(scalar) is np.float32
    with pytest.raises(ValueError, match="not a scalar"):
        nd.ones((2, *shape)).asscalar()


# ---- dtypes ---------------------------------------------------------------------------------------------------------

HALF, DOUBLE = nd.ones(2, dtype="float16"), gluon.Parameter("double", shape=(2,), dtype="float64")

# NumPy 1.20 to 2.2 announce that 2.3 refuses objects whose attribute `dtype` is a class, as MXNet's is.
announced = pytest.mark.filterwarnings("ignore:in the future the `.dtype` attribute")


def cast(layer, dtype):
    layer.initialize()
    layer.cast(dtype)
    return layer


# Each function makes an array or a layer with the dtype that it is given.
TAKES_A_DTYPE = {
    "astype": lambda dtype: nd.arange(2).astype(dtype),
    "astype without a copy": lambda dtype: nd.arange(2).astype(dtype, copy=False),
    "cast": lambda dtype: nd.cast(nd.arange(2), dtype=dtype),
    "zeros": lambda dtype: nd.zeros(2, dtype=dtype),
    "empty": lambda dtype: nd.empty(2, dtype=dtype),
    "array": lambda dtype: nd.array([1, 2], dtype=dtype),
    "sparse zeros": lambda dtype: nd.sparse.zeros("row_sparse", (2, 2), dtype=dtype),
    "random numbers": lambda dtype: nd.random.uniform(shape=2, dtype=dtype),
    "mx.np.zeros": lambda dtype: mx.np.zeros(2, dtype=dtype),
    "mx.np.array": lambda dtype: mx.np.array([1, 2], dtype=dtype),
    "mx.np astype": lambda dtype: mx.np.ones(2).astype(dtype),
    "a layer": lambda dtype: cast(gluon.nn.Dense(2, in_units=2), dtype).weight.data(),
    "a symbol": lambda dtype: sym.zeros(2, dtype=dtype).bind(mx.cpu(), {}).forward()[0],
}


@announced
@pytest.mark.parametrize("name", TAKES_A_DTYPE)
@pytest.mark.parametrize("given", [HALF, HALF.as_np_ndarray(), DOUBLE], ids=["nd", "np", "parameter"])
def test_an_array_or_a_parameter_given_as_a_dtype_stands_for_its_own(name, given):
    assert np.dtype(TAKES_A_DTYPE[name](given).dtype) == np.dtype("float64" if given is DOUBLE else "float16")
    with pytest.raises(TypeError, match="colour"):
        nd.zeros(2, dtype="colour")


@pytest.mark.skipif(np.__version__.startswith("2.3."), reason="NumPy 2.3 asks the object for nothing but a dtype")
@announced
def test_numpy_itself_takes_an_array_or_a_parameter_for_a_dtype():
    assert np.dtype(HALF) == np.dtype(HALF.as_np_ndarray()) == np.float16
    assert np.zeros(2, dtype=DOUBLE).astype(HALF).dtype == np.float16
