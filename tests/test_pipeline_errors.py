"""Bad input of a pipeline, failures inside its stages, and its cut."""

import time

import numpy as np
import pytest
from pipeline_nets import assert_equal, batch, cpus, layers, reference, set_weights, trainer_of

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.mxnet import engine
from mxnet import autograd, gluon, nd

LOSS = gluon.loss.L2Loss()
X, Y = batch(6)


def dense(units, in_units):
    block = gluon.nn.Dense(units, in_units=in_units)
    block.initialize()
    return block


def chain(*blocks):
    net = gluon.nn.Sequential()
    net.add(*blocks)
    return net


def empty():
    with mx.util.np_shape(True):
        return nd.zeros((0, 6), dtype="float64")


def two(devices=None, num=2, **options):
    """A pipeline of two layers."""
    return gp.Pipeline(layers(2), devices or cpus(0, 1), num, **options)


def shared():
    block = dense(6, 6)
    return [block, gluon.nn.Dense(6, in_units=6, params=block.params)]


partition = gp.pipeline.partition
MADE = [
    (lambda: gp.Pipeline([dense(2, 2)], cpus(0, 1), 2), "1 stages and 2 devices"),
    (lambda: gp.Pipeline([dense(2, 2)] * 2, cpus(0, 1, 2, 3), 2), r"2 stages and 4 devices .* \[\[d0, d1\]"),
    (lambda: gp.Pipeline(partition(layers(), 3), cpus(0, 1), 2), "3 stages and 2 devices"),
    (lambda: gp.Pipeline(shared(), cpus(0, 1), 2), "belongs to stages 0 and 1"),
    (lambda: gp.Pipeline(dense(2, 2), cpus(0, 1), 2), "a Dense cannot be cut"),
    (lambda: gp.Pipeline([gluon.nn.Dense(2), dense(2, 2)], cpus(0, 1), 2), "of stage 0 is not initialised"),
    (lambda: gp.Pipeline(["a", "b"], cpus(0, 1), 2), r"stages\[0\]: expected a Gluon block, got a str"),
    (lambda: gp.Pipeline(None, cpus(0, 1), 2), "stages is a NoneType; expected a list of Gluon blocks"),
    (lambda: two(cpus(0, 1, 2)), "at most 2, the number of the net's layers"),
    (lambda: two([cpus(0, 1), cpus(2)]), "replicas need equally many devices"),
    (lambda: two(iter([iter(cpus(0, 1)), cpus(1, 2)])), r"cpu\(1\) stands there more than once"),
    (lambda: two("cpu:2"), "write gp.devices"),
    (lambda: two([cpus(0, 1), []]), "expected a list with one device per stage"),
    (lambda: two([cpus(0, 1), [mx.cpu(2), mx.gpu(99)]]), r"gpu\(99\) in \[.* is not there; this machine"),
    (lambda: two(num="2"), "num_micro_batches: expected a whole number .* got '2'"),
    (lambda: two(order=["1f1b"]), "order: expected one of 'gpipe', '1f1b', got \\['1f1b'\\]"),
    (lambda: two(recompute="no"), "recompute: expected True or False, got 'no'"),
    (lambda: two(accumulate=0), "accumulate: expected a whole number"),
    (lambda: two(batch_axis=None)(X), "batch_axis is None; expected a whole"),
    (lambda: two()(), "holds no array"),
    (lambda: two()([X, X]), r"x\[0\] is a list"),
    (lambda: two()(empty()), "no samples"),
    (lambda: two()(X, X), "stage 0 .* 2 arrays"),
    (lambda: partition(layers(2), 2, [X]), r"got a list; .* partition\(net, num_stages, x\)"),
    (lambda: partition(layers(2), 2, X[:, :4]), r"layer 0 \(Dense\) cannot take .*\(6, 4\) float64.*\(6, 6\)"),
    (lambda: partition(layers(2), 2, empty()), "batch: got an empty NDArray"),
    (lambda: partition(chain(dense(3, 6), dense(3, 5)), 2, X.astype("float32")), "what layer 0 .* returned"),
    (lambda: partition(chain(gluon.nn.Dense(3)), 1, X), "has no values yet: call net.initialize"),
]


@pytest.mark.parametrize(("make", "message"), MADE)
def test_what_does_not_fit_is_refused_when_the_pipeline_is_made_or_called(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_row_sparse_gradients_are_refused():
    words = gluon.nn.Embedding(4, 6, sparse_grad=True, prefix="words_")
    words.initialize()
    pipe = gp.Pipeline([words, dense(2, 6)], cpus(0, 1), 2)
    with pytest.raises(gp.errors.GradientUnavailable, match="words_weight: MXNet cannot add up row_sparse gradients"):
        pipe.step(LOSS, trainer_of(pipe.collect_params()), nd.array([1, 2]), nd.ones((2, 2)))


def step_of(pipe, trainer=None):
    trainer = trainer or trainer_of(pipe.collect_params())
    return lambda x=X, y=Y, loss=LOSS: pipe.step(loss, trainer, x, y)


STEPS = [
    ({"x": X[:2], "y": Y[:2]}, "2 samples and 3 micro-batches: each needs a sample"),
    ({"x": X, "y": Y[:5]}, "differ in their number of samples"),
    ({"x": [[X]]}, "a stage takes arrays"),
    ({"x": None}, "and the trainer's store meets none"),
    ({"x": X[:, :4]}, r"stage 0 .* cannot take its input: .*\(2, 4\).*Shape inconsistent"),
    ({"x": X.astype("int32")}, r"stage 0 .* cannot take its input: .*\(2, 6\) int32"),
    ({"x": (X, Y), "y": ()}, r"stage 0 .* 2 arrays of .* A loader's pair \(x, y\) is unpacked"),
    ({"y": ()}, r"the loss cannot take, for 2 samples, .* nothing: .* Pass labels after x"),
    ({"y": None}, "is a NoneType; a batch is an NDArray"),
    ({"y": Y[:, 0]}, r"the loss cannot take, .*\(2, 6\) float64 from the last .* as labels, .*\(2,\)"),
    ({"loss": lambda out, y: LOSS(out, y).mean()}, "pass reduction="),
    ({"loss": lambda out: LOSS(out)}, "the loss cannot take, .* 2 were given"),
]


@pytest.mark.parametrize(("arguments", "message"), STEPS)
def test_a_batch_that_does_not_fit_is_refused_and_changes_nothing(arguments, message):
    net = layers()
    before = net[0].weight.data().asnumpy()
    step = step_of(gp.Pipeline(net, cpus(0, 1), 3))
    with pytest.raises(ValueError, match=message):
        step(**arguments)
    np.testing.assert_array_equal(net[0].weight.data().asnumpy(), before)
    other = layers()
    reference(other, LOSS, [(X, Y)])
    step()
    assert_equal(net, other)


@pytest.mark.parametrize(("in_units", "calls", "num"), [(6, False, 3), (6, True, 3), (0, False, 1)])
@pytest.mark.parametrize("hybridize", [False, True])
def test_a_stage_that_cannot_take_what_the_one_before_returns_is_named_with_both_shapes(
    in_units, calls, num, hybridize
):
    blocks, (x, y) = [dense(5, in_units), dense(6, 4)], (one.astype("float32") for one in (X, Y))
    for block in blocks:
        block.hybridize(active=hybridize)
    pipe = gp.Pipeline(blocks, cpus(0, 1), 2)
    with pytest.raises(gp.errors.PipelineMismatch, match=rf"stage 1 .* stage 0 .*\({num}, 5\) float32.*\(6, 4\)"):
        pipe(x) if calls else step_of(pipe)(x, y)


@pytest.mark.parametrize(
    ("number", "function", "said"),
    [
        (0, lambda x: {"x": x}, "dict"),
        (1, lambda x: (x, [x]), "list"),
        (0, lambda x: None, "NoneType"),
        (1, lambda x: (x, 1), "int"),
    ],
)
def test_a_stage_that_returns_something_else_than_arrays_is_named(number, function, said):
    blocks = [chain(layers(1, prefix=f"net{place}_")) for place in range(2)]
    blocks[number].add(gluon.nn.Lambda(function))
    with pytest.raises(gp.errors.PipelineMismatch, match=rf"stage {number} .* returned {said}; expected an NDArray"):
        step_of(gp.Pipeline(blocks, cpus(0, 1), np.int64(2)))()


@pytest.mark.parametrize("stages", ["before", "behind"])
def test_a_stage_that_reduces_the_batch_is_refused_where_micro_batches_are_joined_or_cut(stages):
    """Where SyncBatchNorm takes all micro-batches as one, and in a call, which returns them as one."""
    mean = gluon.nn.HybridLambda(lambda F, x: F.mean(x, axis=0, keepdims=True))
    norm = set_weights(gp.nn.SyncBatchNorm(in_channels=6))
    blocks = [norm, chain(layers(1), mean)]
    if stages == "before":
        pipe = gp.Pipeline([blocks[1], norm], cpus(0, 1), 2)
        message = r"stage 0 returned an array of shape \(1, 6\) for 3 samples"
    else:
        pipe = gp.Pipeline([chain(*blocks), layers(1, prefix="last_")], cpus(0, 1), 2)
        message = r"stage 0 returned an array of shape \(1, 6\) for 6 samples"
    with pytest.raises(gp.errors.PipelineMismatch, match=message):
        step_of(pipe)()
    with pytest.raises(gp.errors.PipelineMismatch, match=r"stage 1 returned .* \(1, 6\) for 3 samples.*axis 0"):
        pipe(X)
    engine.settle()


def test_a_step_while_recording_and_a_call_while_recording_are_refused():
    pipe = gp.Pipeline(layers(), cpus(0, 1), 2)
    step = step_of(pipe)
    with autograd.record():
        with pytest.raises(gp.errors.GradientUnavailable, match="records, and goes backward, by itself"):
            step()
        with pytest.raises(gp.errors.GradientUnavailable, match="have a graph each"):
            pipe(X)


def test_another_trainer_than_the_pipelines_is_refused():
    pipe = gp.Pipeline(layers(), [cpus(0, 1), cpus(2, 3)], 2)
    for trainer in (X, None):
        with pytest.raises(ValueError, match="expected a gluon.Trainer"):
            pipe.step(LOSS, trainer, X, Y)
    with pytest.raises(gp.errors.GradientUnavailable, match="none of the parameters"):
        pipe.step(LOSS, trainer_of(layers(prefix="other_").collect_params()), X, Y)


class Fails(gluon.HybridBlock):
    """Fails at a call: at once, or on the device."""

    def __init__(self, call):
        super().__init__()
        self._call, self._calls = call, 0

    def forward(self, x):
        self._calls += 1
        if self._calls == self._call:
            raise KeyError("the third one")
        return x * 2


def test_a_failure_inside_a_stage_is_raised_and_the_next_step_is_whole():
    net, one = layers(2), layers(2)
    pipe = gp.Pipeline([net[0], Fails(3), net[1]], cpus(0, 1, 2), 4)
    step = step_of(pipe)
    with pytest.raises(KeyError, match="the third one"):
        step()
    double = gluon.nn.HybridSequential()
    double.add(one[0], gluon.nn.HybridLambda(lambda F, x: x * 2), one[1])
    reference(double, LOSS, [(X, Y)])
    step()
    assert_equal(net[0], one[0])
    assert_equal(net[1], one[1])


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_replica_that_fails_leaves_no_sync_batch_norm_waiting(num_micro_batches):
    net = gluon.nn.Sequential()
    net.add(Fails(2), gp.nn.SyncBatchNorm(in_channels=6), gluon.nn.Dense(6, in_units=6))
    set_weights(net)
    pipe = gp.Pipeline([net[0:2], net[2:]], [cpus(0, 1), cpus(2, 3)], num_micro_batches)
    step = step_of(pipe)
    began = time.perf_counter()
    with pytest.raises(KeyError):
        step()
    with pytest.raises((gp.errors.BarrierBroken, mx.base.MXNetError)):
        nd.waitall()
    assert time.perf_counter() - began < 120  # a layer's limit
    engine.settle()
    assert np.isfinite(step().asscalar())


def test_a_cut_by_bytes_and_one_by_time():
    net = gluon.nn.HybridSequential()
    inner = gluon.nn.HybridSequential()
    inner.add(gluon.nn.Dense(300, in_units=300), gluon.nn.Dense(2, in_units=300))
    net.add(gluon.nn.Dense(300, in_units=4), inner, gluon.nn.HybridLambda("tanh"))
    net.initialize()
    by_bytes = gp.pipeline.partition(net, 2)
    assert [len(stage) for stage in by_bytes] == [1, 3]
    assert "not measured" in str(by_bytes)
    by_time = gp.pipeline.partition(net, 2, nd.ones((64, 4)))
    assert sum(len(stage) for stage in by_time) == 4 and "%" in str(by_time)
    assert by_time.net is net
    seconds = [sum(layer.seconds for layer in layers) for layers in by_time.layers]
    times = [layer.seconds for layers in by_time.layers for layer in layers]
    assert max(seconds) == pytest.approx(min(max(sum(times[:i]), sum(times[i:])) for i in (1, 2, 3)))
