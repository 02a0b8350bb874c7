"""The loss of pixels is NumPy's and GluonCV's, and a step's mean is over the pixels that count, wherever they are."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

pytestmark = pytest.mark.arithmetic

VOID = -1


def in_numpy(logits, masks):
    """The loss of each pixel, 0 where it is void, (N, H, W), and its gradient (N, C, H, W), in float64."""
    exponentials = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    shares = exponentials / exponentials.sum(axis=1, keepdims=True)
    chosen = np.arange(logits.shape[1])[:, None, None] == masks[:, None]
    counts = masks != VOID
    return -np.log(np.where(chosen, shares, 1)).sum(axis=1) * counts, (shares - chosen) * counts[:, None]


@pytest.fixture
def batch(rng):
    """Two outputs of three images with four classes, and masks in which some pixels are void."""
    logits, auxiliary = rng.normal(size=(2, 3, 4, 5, 6)).astype("float32")
    masks = rng.integers(-1, 4, size=(3, 5, 6)).astype("int32")
    return logits, auxiliary, masks


@pytest.mark.parametrize("hybridize", [False, True])
def test_each_output_has_the_sum_over_the_pixels_that_count_their_number_and_gradient(batch, hybridize):
    *outputs, masks = batch
    loss = gp.models.PixelLoss(aux_weight=0.4, background_weight=0.3)
    loss.hybridize(active=hybridize)
    arrays = [mx.nd.array(output) for output in outputs]
    for array in arrays:
        array.attach_grad()
    with mx.autograd.record():
        pairs = loss(*arrays, mx.nd.array(masks, dtype="int32"))
        total = sum(sums for sums, _ in pairs)
    total.backward()
    weight = np.where(masks == 0, 0.3, 1)  # the background counts less
    for output, array, (sums, count), factor in zip(outputs, arrays, pairs, (1, 0.4)):
        values, gradient = in_numpy(output, masks)
        assert count.asscalar() == (masks != VOID).sum()
        # float32: 90 terms are added
        assert sums.asscalar() == pytest.approx(factor * (values * weight).sum(), rel=1e-5, abs=1e-5)
        wanted = factor * gradient * weight[:, None]
        np.testing.assert_allclose(array.grad.asnumpy(), wanted, rtol=1e-4, atol=1e-6)


def test_a_confident_mistake_has_a_finite_loss():
    [(total, _)] = gp.models.PixelLoss()(mx.nd.array([[[[1000.0]], [[-1000.0]]]]), mx.nd.array([[[1]]]))
    assert total.asscalar() == 2000


def steps(devices, images, masks, sizes):
    """The weights after one step per size, and the losses."""
    net = gluon.nn.Conv2D(4, 1, in_channels=3)  # classes are a linear function of each pixel's colour
    net.initialize(mx.init.Constant(0.1), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5, "momentum": 0.9})
    loss = gp.models.PixelLoss()
    loss.hybridize()
    parallel = gp.DataParallel(net, loss, trainer)
    losses = []
    for end, size in zip(np.cumsum(sizes), sizes):
        own = masks[end - size : end]
        losses.append(parallel.step(images[end - size : end], own).asscalar())
    return net.weight.data(devices[-1]).asnumpy(), losses


@pytest.fixture
def pictures(rng):
    """Twelve images; the second and third are void, so one device may have nothing that counts."""
    masks = rng.integers(-1, 4, size=(12, 5, 6)).astype("int32")
    masks[1:3] = VOID
    return rng.normal(size=(12, 3, 5, 6)).astype("float32"), masks


def test_a_batch_in_which_nothing_counts_changes_nothing(pictures):
    images, masks = pictures
    before, _ = steps([mx.cpu(0)], images, masks, ())
    after, losses = steps([mx.cpu(0), mx.cpu(1)], images, np.full_like(masks, VOID), (4,))
    np.testing.assert_array_equal(after, before)
    assert losses == [0]
