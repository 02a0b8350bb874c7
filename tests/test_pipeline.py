"""A pipeline's step is that of the unsplit net with the whole batch, by comparison in float64."""

import numpy as np
import pytest
from pipeline_nets import TOLERANCE, assert_equal, batch, cpus, layers, reference, set_weights, trainer_of, values

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


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(2, 1), (2, 8), (3, 2), (3, 7), (4, 6)])
def test_steps_are_those_of_the_unsplit_net(unsplit, num_stages, num_micro_batches, order, recompute):
    net = layers()
    net.hybridize(active=num_micro_batches % 2 == 0)
    devices = cpus(*range(num_stages))
    assert_trains_like(unsplit, gp.Pipeline(net, devices, num_micro_batches, order, recompute), net)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 2), (2, 2), (2, 4)])
def test_replicas_share_the_batch(unsplit, num_stages, num_micro_batches, order):
    net = layers()
    net.hybridize()
    rows = [cpus(*range(num_stages)), cpus(*range(num_stages, 2 * num_stages))]
    assert_trains_like(unsplit, gp.Pipeline(net, rows, num_micro_batches, order, recompute=True), net)
    for parameter in net.collect_params().values():
        first, second = (copy.asnumpy() for copy in parameter.list_data())
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_may_be_the_mean_or_the_sum_of_a_micro_batch(unsplit, reduction):
    net = layers()
    pipe = gp.Pipeline(net, cpus(0, 1), 3, reduction=reduction)
    assert_trains_like(unsplit, pipe, net, lambda out, y: getattr(LOSS(out, y), reduction)())


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
    """Passes one of its inputs on, and whole numbers beside."""

    def __init__(self):
        super().__init__()
        with self.name_scope():
            self.dense = gluon.nn.Dense(6, in_units=6, activation="tanh")

    def hybrid_forward(self, F, x, ids):
        return self.dense(x), x, ids


class Middle(gluon.HybridBlock):
    """Passes everything on but its first input, which it changes by two operators."""

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

    def make():
        blocks = [First(), Middle(), Last()]
        for number, block in enumerate(blocks):
            set_weights(block, number)
            block.hybridize(active=hybridize)
        return blocks

    random = np.random.RandomState(3)
    (x, y), ids = batch(7), nd.array(random.randint(0, 4, 7), dtype="int32")
    whole, blocks = make(), make()
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


def test_a_gradient_comes_back_through_an_input_that_is_passed_on():
    """MXNet forgets the graph of an array that a small hybridized block passes on."""
    first, middle, last = gluon.nn.Dense(6, in_units=6), Middle(), Last()
    blocks = [set_weights(block, number) for number, block in enumerate((first, middle, last))]
    for block in blocks:
        block.hybridize()

    class Fork(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.dense = first

        def hybrid_forward(self, F, x, ids):
            h = self.dense(x)
            return h, h, ids

    fork = Fork()
    fork.hybridize()
    (x, y), ids = batch(6), nd.array([0, 1, 2, 3, 0, 1], dtype="int32")
    with autograd.record():
        h = first(x)
        losses = LOSS(last(nd.tanh(h * 2), h, ids)[0], y)
    losses.backward()
    wanted = first.weight.grad().asnumpy()
    pipe = gp.Pipeline([fork, middle, last], cpus(0, 1, 2), 2)
    pipe.step(lambda out, h, y: LOSS(out, y), trainer_of(pipe.collect_params()), (x, ids), y)
    np.testing.assert_allclose(first.weight.grad().asnumpy(), wanted, **TOLERANCE)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_dropout_draws_the_same_numbers_when_it_is_recomputed(order):
    """The gradient of a sum of outputs that are linear in the last weights is a mean of what went forward."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dropout(0.5), gluon.nn.Dense(1, in_units=50, use_bias=False), gluon.nn.HybridLambda("identity"))
    set_weights(net)
    pipe = gp.Pipeline([net[0:2], net[2:]], cpus(0, 1), 3, order, recompute=True)
    trainer = gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0.0})
    x = nd.ones((6, 50), dtype="float64")
    seen = set()
    for _ in range(3):
        mean = pipe.step(lambda out: out, trainer, x).asscalar()
        weight = net[1].weight
        # loss = sum over samples of dropped . weight, so the sum of the gradient times the weight is the same number
        assert (weight.grad() * weight.data()).sum().asscalar() / 6 == pytest.approx(mean, rel=1e-9)
        seen.add(mean)
    assert len(seen) == 3, "each step draws its own numbers"


def test_steps_follow_from_the_seed_with_dropout_and_recomputation():
    def train():
        net = gluon.nn.HybridSequential()
        for _ in range(3):
            net.add(gluon.nn.Dense(6, in_units=6, activation="tanh"), gluon.nn.Dropout(0.5))
        pipe = gp.Pipeline(set_weights(net), cpus(0, 1), 3, recompute=True)
        trainer = trainer_of(pipe.collect_params())
        for step, (x, y) in enumerate(BATCHES):
            gp.reseed(3, 0, step)
            pipe.step(LOSS, trainer, x, y)
        return values(net)

    second = train()
    for name, value in train().items():
        np.testing.assert_array_equal(value, second[name])


def test_calling_the_pipeline_is_the_forward_pass(unsplit):
    net = layers()
    net.hybridize()
    x, _ = BATCHES[0]
    wanted = net(x).asnumpy()
    for rows in (cpus(0, 1), [cpus(0, 1), cpus(2, 3)]):
        for num in (1, 4, 11):
            np.testing.assert_allclose(gp.Pipeline(net, rows, 4)(x[:num]).asnumpy(), wanted[:num], **TOLERANCE)


@pytest.mark.parametrize("calls_first", [False, True])
def test_shapes_may_follow_from_the_first_batch(calls_first):
    blocks = [gluon.nn.Dense(6, activation="tanh"), gluon.nn.Dense(6)]
    for block in blocks:
        block.initialize()
    pipe = gp.Pipeline(blocks, [cpus(0, 1), cpus(2, 3)], 2)
    trainer = trainer_of(pipe.collect_params())
    x, y = (array.astype("float32") for array in batch(8))
    if calls_first:
        assert pipe(x).shape == (8, 6)
    losses = [pipe.step(LOSS, trainer, x, y).asscalar() for _ in range(3)]
    assert losses[2] < losses[0]
