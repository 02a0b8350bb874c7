"""LeNet has the parameters it is known for, and states them before it sees an image."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx

pytestmark = pytest.mark.arithmetic


def convolve(images, weight, bias):
    """(N, C, H, W) images through (K, C, h, w) filters, window by window, in float64."""
    size = weight.shape[2]
    height, width = images.shape[2] - size + 1, images.shape[3] - size + 1
    out = np.zeros((len(images), len(weight), height, width))
    for i in range(height):
        for j in range(width):
            out[:, :, i, j] = np.tensordot(images[:, :, i : i + size, j : j + size], weight, ((1, 2, 3), (1, 2, 3)))
    return out + bias.reshape(1, -1, 1, 1)


def pool(x):
    x = x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
    return x.reshape(*x.shape[:2], x.shape[2] // 2, 2, x.shape[3] // 2, 2).mean(axis=(3, 5))


@pytest.mark.parametrize(("channels", "size"), [(1, (28, 28)), (3, (32, 32)), (2, (17, 20))])
def test_lenet_computes_what_ten_lines_of_numpy_compute(rng, channels, size):
    net = gp.models.LeNet(7, channels, size)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    images = rng.normal(size=(3, channels, *size))
    params = [param.data().asnumpy().astype("float64") for param in net.collect_params().values()]
    h = images
    for weight, bias in (params[0:2], params[2:4]):
        h = pool(np.maximum(convolve(h, weight, bias), 0))
    h = np.maximum(h.reshape(3, -1) @ params[4].T + params[5], 0)
    wanted = h @ params[6].T + params[7]
    got = net(mx.nd.array(images)).asnumpy()
    # float32: 800 products are added, each rounded to 6e-8 of numbers of size 1
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_lenet_has_its_parameters_before_its_first_image_which_must_not_be_too_small():
    net = gp.models.LeNet()
    shapes = [param.shape for param in net.collect_params().values()]
    assert shapes == [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (128, 800), (128,), (10, 128), (10,)]
    with pytest.raises(ValueError, match=r"image_size is \(28, 13\), wanted at least \(14, 14\)"):
        gp.models.LeNet(image_size=(28, 13))
    gp.models.LeNet(image_size=(14, 14))
