"""Losses that look at other samples of the batch, in plain operators, and nets to train with them."""

import numpy as np

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

NUM_FEATURES = 4


def unit(z):
    return nd.broadcast_div(z, nd.norm(z, axis=1, keepdims=True) + 1e-6)


def nt_xent(one, other, temperature=0.5):
    """SimCLR's loss of two views of N samples, (N, C) each: every other one of the 2 N - 1 is a negative."""
    z, num = unit(nd.concat(one, other, dim=0)), len(one)
    scores = nd.dot(z, z, transpose_b=True) / temperature
    scores = scores - 1e4 * nd.eye(2 * num, ctx=z.ctx)
    targets = nd.concat(nd.arange(num, 2 * num, ctx=z.ctx), nd.arange(num, ctx=z.ctx), dim=0)
    return -nd.pick(nd.log_softmax(scores), targets).mean()


def in_batch_negatives(query, document):
    """One value per sample: how far its own document is from being chosen among those of the batch."""
    scores = nd.dot(query, document, transpose_b=True)
    return -nd.pick(nd.log_softmax(scores), nd.arange(len(query), ctx=query.ctx))


def triplet(z, labels, margin=1.0):
    """The hardest positive and negative of each anchor of the batch; the mean over the anchors that have both."""
    squares = (z * z).sum(axis=1)
    distances = squares.expand_dims(1) + squares.expand_dims(0) - 2 * nd.dot(z, z, transpose_b=True)
    same = nd.broadcast_equal(labels.expand_dims(1), labels.expand_dims(0)).astype("float32")
    far = (distances * same).max(axis=1)
    near = (distances + 1e4 * same).min(axis=1)
    is_valid = ((same.sum(axis=1) > 1) * (same.min(axis=1) == 0)).astype("float32")
    return (nd.relu(far - near + margin) * is_valid).sum() / nd.maximum(is_valid.sum(), 1)


class Clip(gluon.loss.Loss):
    """CLIP's symmetric loss of two outputs, with a learned temperature, a parameter of the loss."""

    def __init__(self):
        super().__init__(weight=None, batch_axis=0, prefix="clip_")
        self.scale = self.params.get("scale", shape=(1,), init=mx.init.Constant(0.7))

    def hybrid_forward(self, F, images, texts, scale):
        scores = F.broadcast_mul(F.dot(unit(images), unit(texts), transpose_b=True), scale.exp())
        own = F.arange(len(images), ctx=images.ctx)
        by_image, by_text = (-F.pick(F.log_softmax(one), own).mean() for one in (scores, scores.T))
        return (by_image + by_text) / 2


class CentreLoss(gluon.loss.Loss):
    """The distance from the learned centre of each sample's class, and the centres' distance from the batch's mean."""

    def __init__(self, num_classes=3):
        super().__init__(weight=None, batch_axis=0, prefix="centres_")
        self.centres = self.params.get("centres", shape=(num_classes, NUM_FEATURES), init=mx.init.Constant(0.3))

    def hybrid_forward(self, F, z, labels, centres):
        own = ((z - F.take(centres, labels)) ** 2).sum(axis=1)
        return own - 0.1 * F.broadcast_sub(centres, z.mean(axis=0, keepdims=True)).square().mean()


class Encoder(gluon.nn.HybridSequential):
    """(N, 5) to (N, 4), with batch norm on the way: SyncBatchNorm over the processes of `store`, or on one device."""

    def __init__(self, store, prefix):
        super().__init__(prefix=prefix)
        with self.name_scope():
            self.add(gluon.nn.Dense(6, in_units=5, activation="tanh"))
            self.add(gp.nn.SyncBatchNorm(in_channels=6, kvstore=store, epsilon=1e-2))
            self.add(gluon.nn.Dense(NUM_FEATURES, in_units=6))


class Towers(gluon.nn.HybridBlock):
    """Two inputs, two outputs; both by one encoder, or each by its own."""

    def __init__(self, store, is_shared, prefix="towers_"):
        super().__init__(prefix=prefix)
        with self.name_scope():
            self.first = Encoder(store, "first_")
            self.second = self.first if is_shared else Encoder(store, "second_")

    def hybrid_forward(self, F, one, other):
        return self.first(one), self.second(other)


def make_towers(store):
    return Towers(store, is_shared=True)


def make_two_towers(store):
    return Towers(store, is_shared=False)


def make_encoder(store):
    return Encoder(store, "encoder_")


# name: (net of a store, makes the loss, whether the input is a pair, whether there are labels)
CASES = {
    "simclr": (make_towers, lambda: nt_xent, True, False),
    "negatives": (make_two_towers, lambda: in_batch_negatives, True, False),
    "clip": (make_two_towers, Clip, True, False),
    "triplet": (make_encoder, lambda: triplet, False, True),
    "centre": (make_encoder, CentreLoss, False, True),
}


def batches(name, sizes, seed=3):
    """(inputs, labels) of batches of these sizes, NumPy arrays in tuples."""
    _, _, is_pair, has_labels = CASES[name]
    random = np.random.RandomState(seed)
    for size in sizes:
        inputs = tuple(random.standard_normal((size, 5)).astype("float32") for _ in range(1 + is_pair))
        yield inputs, (random.randint(0, 3, size).astype("int32"),) * has_labels


def make(name, devices, store=None, hybridize=False, dtype="float32"):
    """Net, loss and trainer of a case, with the same weights every time."""
    make_net, make_loss, _, _ = CASES[name]
    net, loss = make_net(store), make_loss()
    blocks = [one for one in (net, loss) if isinstance(one, gluon.Block)]
    parameters = gluon.ParameterDict()
    for block in blocks:
        parameters.update(block.collect_params())
    parameters.initialize(ctx=devices)
    random = np.random.RandomState(0)
    for parameter in parameters.values():
        if parameter.name.endswith(("weight", "bias", "centres")):
            parameter.set_data(nd.array(random.standard_normal(parameter.shape) / 2))
    for block in blocks:
        block.cast(dtype)
    if hybridize:
        net.hybridize()
    options, kvstore = {"learning_rate": 0.05, "momentum": 0.9}, "device" if store is None else store
    return net, loss, gluon.Trainer(parameters, "sgd", options, kvstore=kvstore, update_on_kvstore=False), parameters


def train_alone(name, steps):
    """A plain loop of Gluon on one device, with the whole batches: the values of its losses, and its parameters."""
    net, loss, trainer, parameters = make(name, [mx.cpu(9)])
    values = []
    for inputs, labels in steps:
        with mx.autograd.record():
            returned = net(*(nd.array(one, mx.cpu(9)) for one in inputs))
            outputs = returned if isinstance(returned, (list, tuple)) else (returned,)
            value = loss(*outputs, *(nd.array(one, mx.cpu(9), one.dtype) for one in labels))
        value.backward()
        trainer.step(1 if value.size == 1 else len(value))
        values.append(value.mean().asscalar())
    return values, parameters


def assert_equal_weights(parameters, wanted, tolerance=2e-5):
    for ours, theirs in zip(parameters.values(), wanted.values()):
        for copy in ours.list_data():  # float32 sums in another order
            np.testing.assert_allclose(
                copy.asnumpy(), theirs.list_data()[0].asnumpy(), rtol=tolerance, atol=tolerance, err_msg=ours.name
            )
