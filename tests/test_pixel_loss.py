"""The loss of pixels is NumPy's and GluonCV's, and a step's mean is over the pixels that count, wherever they are."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

pytestmark = pytest.mark.arithmetic

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")
VOID = -1


def cross_entropy(logits, masks):
    """The loss of each pixel in float64: (N, H, W), 0 where the pixel is void."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    chosen = np.take_along_axis(log_softmax, np.maximum(masks, 0)[:, None], axis=1)[:, 0]
    return np.where(masks == VOID, 0, -chosen)


@pytest.fixture
def batch(rng):
    """Two outputs of three images with four classes, and masks in which some pixels are void."""
    logits, auxiliary = rng.normal(size=(2, 3, 4, 5, 6)).astype("float32")
    masks = rng.integers(-1, 4, size=(3, 5, 6)).astype("int32")
    return logits, auxiliary, masks


@pytest.mark.parametrize("hybridize", [False, True])
def test_each_output_has_the_sum_over_the_pixels_that_count_and_their_number(batch, hybridize):
    logits, auxiliary, masks = batch
    loss = gp.models.PixelLoss(aux_weight=0.4, background_weight=0.3)
    loss.hybridize(active=hybridize)
    pairs = loss(*map(mx.nd.array, (logits, auxiliary)), mx.nd.array(masks, dtype="int32"))
    (main, count), (other, again) = [[array.asscalar() for array in pair] for pair in pairs]
    assert count == again == (masks != VOID).sum()
    weight = np.where(masks == 0, 0.3, 1)  # the background counts less; float32: 90 terms are added
    assert main == pytest.approx((cross_entropy(logits, masks) * weight).sum(), rel=1e-5, abs=1e-5)
    assert other == pytest.approx(0.4 * (cross_entropy(auxiliary, masks) * weight).sum(), rel=1e-5, abs=1e-5)


def value_and_gradients(value_of, logits, auxiliary, masks):
    outputs = [mx.nd.array(logits), mx.nd.array(auxiliary)]
    for output in outputs:
        output.attach_grad()
    with mx.autograd.record():
        value = value_of(*outputs, mx.nd.array(masks))
    value.backward()
    return value.sum().asscalar(), [output.grad.asnumpy() for output in outputs]


def test_value_and_gradient_are_those_of_gluoncvs_loss_which_leaves_the_auxiliary_weight_out_of_the_gradient(batch):
    loss = gp.models.PixelLoss(aux_weight=0.4)
    value, ours = value_and_gradients(lambda *arrays: sum(total / count for total, count in loss(*arrays)), *batch)
    theirs = gluoncv.loss.MixSoftmaxCrossEntropyLoss(aux=True, aux_weight=0.4)
    their_value, wanted = value_and_gradients(theirs, *batch)
    masks = batch[2]  # theirs is the mean of each image, in which void pixels count as 0
    assert value * (masks != VOID).sum() == pytest.approx(their_value * masks[0].size, rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(ours[0], wanted[0], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(ours[1], 0.4 * wanted[1], rtol=1e-4, atol=1e-7)


def test_a_confident_mistake_has_a_finite_loss():
    [(total, _)] = gp.models.PixelLoss()(mx.nd.array([[[[1000.0]], [[-1000.0]]]]), mx.nd.array([[[1]]]))
    assert total.asscalar() == 2000


class Colours(gluon.nn.HybridSequential):
    """A net whose classes are a linear function of each pixel's colour."""

    def __init__(self):
        super().__init__(prefix="colours_")
        self.add(gluon.nn.Conv2D(4, 1, in_channels=3))


def steps(devices, images, masks, sizes):
    """The weights after one step per size, and the losses."""
    net = Colours()
    net.initialize(mx.init.Constant(0.1), ctx=devices)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5, "momentum": 0.9})
    loss = gp.models.PixelLoss()
    loss.hybridize()
    parallel = gp.DataParallel(net, loss, trainer)
    losses = []
    for end, size in zip(np.cumsum(sizes), sizes):
        own = masks[end - size : end]
        losses.append(parallel.step(images[end - size : end], own).asscalar())
    return net[0].weight.data(devices[-1]).asnumpy(), losses


@pytest.fixture
def pictures(rng):
    """Twelve images; the second and third are void, so one device may have nothing that counts."""
    masks = rng.integers(-1, 4, size=(12, 5, 6)).astype("int32")
    masks[1:3] = VOID
    return rng.normal(size=(12, 3, 5, 6)).astype("float32"), masks


@pytest.mark.parametrize("num_devices", [2, 3])
def test_several_devices_follow_one_whatever_the_shards_and_the_number_of_void_pixels(pictures, num_devices):
    sizes = (3, 5, 1, 3)  # ragged shards, and a batch smaller than the number of devices
    wanted, losses = steps([mx.cpu(0)], *pictures, sizes)
    got, others = steps([mx.cpu(i) for i in range(num_devices)], *pictures, sizes)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)  # float32 sums in another order
    np.testing.assert_allclose(others, losses, rtol=1e-5, atol=1e-6)


def test_a_batch_in_which_nothing_counts_changes_nothing(pictures):
    images, masks = pictures
    before, _ = steps([mx.cpu(0)], images, masks, ())
    after, losses = steps([mx.cpu(0), mx.cpu(1)], images, np.full_like(masks, VOID), (4,))
    np.testing.assert_array_equal(after, before)
    assert losses == [0]
