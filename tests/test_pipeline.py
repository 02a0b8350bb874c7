"""A pipeline's step is that of the unsplit net with the whole batch, by comparison in float64."""

import numpy as np
import pytest
from pipeline_nets import TOLERANCE, assert_equal, batch, cpus, layers, reference, set_weights, trainer_of

import gluon_parallel as gp
from mxnet import autograd, gluon, nd

LOSS = gluon.loss.L2Loss()
BATCHES = [batch(num, seed=seed) for seed, num in enumerate((11, 8, 8))]


@pytest.fixture(scope="module")
def unsplit():
    net = layers()
    return net, reference(net, LOSS, BATCHES)


def assert_trains_like(unsplit, pipe, net, loss=LOSS, batches=BATCHES):
    trainer = trainer_of(pipe.collect_params())
    losses = [pipe.step(loss, trainer, x, y) for x, y in batches]
    np.testing.assert_allclose([one.asscalar() for one in losses], unsplit[1], **TOLERANCE)
    assert_equal(net, unsplit[0])
    assert_equal(net, unsplit[0], "grad")


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "nadam", "lars", "lamb"])
def test_one_trainer_updates_all_stages(optimizer):
    one, net = layers(), layers()
    reference(one, LOSS, BATCHES, trainer_of(one.collect_params(), optimizer))
    pipe = gp.Pipeline(net, cpus(0, 1, 2), 4)
    trainer = trainer_of(pipe.collect_params(), optimizer)
    update = trainer.optimizer.update_multi_precision

    def update_on_one_device(index, weight, *arguments):  # what GPUs need
        assert len({one.ctx for one in weight} if isinstance(weight, (list, tuple)) else {weight.ctx}) == 1
        update(index, weight, *arguments)

    trainer.optimizer.update_multi_precision = update_on_one_device
    for x, y in BATCHES:
        pipe.step(LOSS, trainer, x, y)
    # MXNet's operator that updates several weights with LAMB computes in float32.
    assert_equal(net, one, rtol=1e-5 if optimizer == "lamb" else 1e-9)


@pytest.mark.parametrize("grad_req", ["write", "add"])
def test_gradients_need_no_zeroing_and_grad_req_stays(unsplit, grad_req):
    net = layers()
    for parameter in net.collect_params().values():
        parameter.grad_req = grad_req
        parameter.grad()[:] = 7
    assert_trains_like(unsplit, gp.Pipeline(net, cpus(0, 1), 3), net)
    [weight, *_] = net[0].collect_params().values()
    assert weight.grad_req == grad_req
    before = weight.grad().asnumpy()
    with autograd.record():
        total = (weight.data() * 2).sum()
    total.backward()
    np.testing.assert_allclose(weight.grad().asnumpy(), 2 if grad_req == "write" else before + 2)


class First(gluon.HybridBlock):
    """Returns twice what depends on its weights, and whole numbers beside."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = gluon.nn.Dense(6, in_units=6)

    def hybrid_forward(self, F, x, ids):
        h = self.dense(x)
        return h, h, ids


class Middle(gluon.HybridBlock):
    """Passes everything on but its first input; MXNet forgets the graph of what a small hybridized block passes on."""

    def hybrid_forward(self, F, h, x, ids):
        return F.tanh(h * 2), x, ids


class Last(gluon.HybridBlock):
    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.embedding = gluon.nn.Embedding(4, 6)
            self.dense = gluon.nn.Dense(6, in_units=6)

    def hybrid_forward(self, F, h, x, ids):
        return self.dense(h) + x * x + self.embedding(ids), h


@pytest.mark.parametrize("hybridize", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_stages_pass_tuples_with_skip_connections_and_whole_numbers(hybridize, recompute):
    def loss(out, h, y):
        return LOSS(out, y) + h.abs().mean(axis=1)

    def make(hybridize):
        blocks = [First(), Middle(), Last()]
        for number, block in enumerate(blocks):
            set_weights(block, number)
            block.hybridize(active=hybridize)
        return blocks

    random = np.random.RandomState(3)
    (x, y), ids = batch(7), nd.array(random.randint(0, 4, 7), dtype="int32")
    whole, blocks = make(False), make(hybridize)  # MXNet alone cannot go backward through what is passed on
    with autograd.record():
        arrays = (x, ids)
        for block in whole:
            arrays = block(*arrays)
        losses = loss(*arrays, y)
    losses.backward()
    pipe = gp.Pipeline(blocks, cpus(0, 1, 2), 3, recompute=recompute)
    trainer = trainer_of(pipe.collect_params())
    mean = pipe.step(loss, trainer, (x, ids), y)
    assert mean.asscalar() == pytest.approx(losses.mean().asscalar(), rel=1e-9)
    for ours, theirs in zip(blocks, whole):
        assert_equal(ours, theirs, "grad")
    assert [out.shape for out in pipe(x, ids)] == [(7, 6), (7, 6)]


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_dropout_draws_the_same_numbers_when_it_is_recomputed_which_follow_from_the_seed(order):
    """The gradient of a sum of outputs that are linear in the last weights is a mean of what went forward."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dropout(0.5), gluon.nn.Dense(1, in_units=50, use_bias=False), gluon.nn.HybridLambda("identity"))
    set_weights(net)
    pipe = gp.Pipeline([net[0:2], net[2:]], cpus(0, 1), 3, order, recompute=True)
    trainer = gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0.0})
    seen = []
    for step in (0, 1, 0, 1):
        gp.reseed(3, 0, step)
        mean = pipe.step(lambda out: out, trainer, nd.ones((6, 50), dtype="float64")).asscalar()
        # loss = sum over samples of dropped . weight, so the sum of the gradient times the weight is the same number
        gradient = net[1].weight.grad() * net[1].weight.data()
        assert gradient.sum().asscalar() / 6 == pytest.approx(mean, rel=1e-9)
        seen.append(mean)
    assert seen[:2] == seen[2:] and seen[0] != seen[1]


def test_calling_the_pipeline_is_the_forward_pass(unsplit):
    net = layers()
    net.hybridize()
    x, _ = BATCHES[0]
    wanted = net(x).asnumpy()
    for rows in (cpus(0, 1), [cpus(0, 1), cpus(2, 3)]):
        for num in (1, 4, 11):
            np.testing.assert_allclose(gp.Pipeline(net, rows, 4)(x[:num]).asnumpy(), wanted[:num], **TOLERANCE)
