"""The check of a loss in the first step: what devices cannot add up is refused alike on any number of them."""

import re
from pathlib import Path

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd
from mxnet.contrib.amp.loss_scaler import LossScaler

RANDOM = np.random.RandomState(0)
X, Y = RANDOM.standard_normal((6, 3, 4, 4)).astype("float32"), RANDOM.randint(0, 4, (6, 4, 4)).astype("float32")
Y[0, :2], Y[1:3] = -1, -1  # so that devices have another number of valid labels each


def softmax_output(normalization, hybrid=False):
    """A loss per sample whose gradient SoftmaxOutput makes, as GluonCV's segmentation losses have it."""

    class Loss(gluon.loss.Loss):
        def hybrid_forward(self, F, output, label):
            options = {"ignore_label": -1, "use_ignore": True, "multi_output": True, "normalization": normalization}
            chosen = -F.pick(F.log(F.SoftmaxOutput(output, label, **options)), label, axis=1)
            return F.mean(F.where(label == -1, F.zeros_like(chosen), chosen), axis=0, exclude=True)

    loss = Loss(None, 0)
    loss.hybridize(active=hybrid)
    return loss


def made_by_make_loss(normalization):
    return lambda output, label: nd.MakeLoss(
        gluon.loss.SoftmaxCrossEntropyLoss(axis=1)(output, nd.relu(label)), normalization=normalization
    )


class HalfAndHalf:
    """A sum and a count, of which one part ignores its head."""

    parts = ("classes",)

    def __call__(self, output, label):
        return [(softmax_output("null")(output, label).sum(), nd.full(1, len(label), output.ctx))]


def trained(loss, sizes, num_devices, **options):
    """The weights after steps of so many samples."""
    net = gluon.nn.Conv2D(4, 1, in_channels=3, use_bias=False)
    net.initialize(mx.init.One(), ctx=gp.devices(f"cpu:{num_devices}"))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    step = gp.DataParallel(net, loss, trainer, **options)
    for size in sizes:
        step(nd.array(X[:size]), nd.array(Y[:size]))
    return [array.asnumpy() for array in net.weight.list_data()][-1]


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (softmax_output("valid"), {}),
        (softmax_output("batch", hybrid=True), {}),
        (made_by_make_loss("valid"), {"accumulate": 2}),
        (lambda output, label: softmax_output("null")(output, label).mean(), {"reduction": "mean"}),
        (HalfAndHalf(), {}),
    ],
    ids=["valid", "batch", "MakeLoss", "mean", "parts"],
)
def test_a_loss_that_ignores_the_gradient_that_it_gets_is_refused_where_that_matters(loss, options, num_devices):
    with pytest.raises(gp.errors.BatchMismatch, match="does not follow from the gradient that it gets.*PixelLoss"):
        trained(loss, [6], num_devices, **options)


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("loss", [softmax_output("null"), made_by_make_loss("null")], ids=["SoftmaxOutput", "MakeLoss"])
def test_a_loss_that_ignores_it_and_sums_over_its_samples_trains_as_on_one_device(loss, num_devices):
    wanted = trained(loss, [6, 5, 6], 1)
    np.testing.assert_allclose(trained(loss, [6, 5, 6], num_devices), wanted, rtol=1e-4, atol=1e-6)  # float32
    assert abs(wanted - 1).max() > 0.01


def test_with_a_loss_scale_it_is_refused_too():
    net = gluon.nn.Conv2D(4, 1, in_channels=3)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", update_on_kvstore=False)
    trainer._amp_loss_scaler = LossScaler()  # as amp.init_trainer sets it
    with pytest.raises(gp.errors.BatchMismatch, match="loss scaling has no effect"):
        gp.DataParallel(net, softmax_output("null"), trainer)(nd.array(X), nd.array(Y))


@pytest.mark.parametrize("num_devices", [2, 3])
def test_the_loss_of_parts_that_the_page_shows_trains_as_on_one_device(num_devices):
    page = (Path(__file__).parents[1] / "docs" / "howto" / "from_gluoncv.md").read_text("utf-8")
    [shown] = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names = {"gluon": gluon}
    exec(shown, names)

    class Loss(names["HeatmapLoss"]):
        def __call__(self, output, label):
            return super().__call__(output, nd.broadcast_like(label.expand_dims(1), output) > 1)

    wanted, got = (trained(Loss(), [3, 6], num) for num in (1, num_devices))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)  # float32


def test_a_loss_for_one_sample_alone_is_taken_at_its_word():
    def loss(output, label):
        assert output.shape[0] == 1
        return ((output.mean(axis=1) - label) ** 2).mean().reshape(1)

    per_sample = gluon.loss.L2Loss(weight=2)
    wanted = trained(lambda output, label: per_sample(output.mean(axis=1), label), [3], 1)
    np.testing.assert_allclose(trained(loss, [3], 3), wanted, rtol=1e-5, atol=1e-6)  # float32


def test_the_check_calls_the_loss_once_more_in_the_first_step():
    calls = []

    def loss(output, label):
        calls.append(len(output))
        return ((output.mean(axis=1) - label) ** 2).mean(axis=(1, 2))

    wanted = trained(loss, [6, 5, 6], 1)
    calls.clear()
    np.testing.assert_allclose(trained(loss, [6, 5, 6], 2), wanted, rtol=1e-5, atol=1e-6)  # float32
    assert calls == [3, 3, 3, 3, 2, 3, 3]


@pytest.mark.parametrize("kind", [gluon.nn.BatchNorm, gp.nn.SyncBatchNorm])
@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_check_moves_no_running_statistics_of_a_net_that_the_loss_calls(num_devices, kind):
    critic = gluon.nn.HybridSequential()
    critic.add(kind(in_channels=4), gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(1, in_units=4))
    critic.initialize(ctx=gp.devices(f"cpu:{num_devices}"))
    trained(lambda output, label: critic(output).reshape(-1), [6], num_devices)
    parts = [X] if kind is gp.nn.SyncBatchNorm else np.split(X, num_devices)
    for mean, seen in zip(critic[0].running_mean.list_data(), parts * num_devices):
        wanted = 0.1 * seen.sum(axis=1).mean()  # each output is the sum of the inputs, for the weights are 1
        np.testing.assert_allclose(mean.asnumpy(), [wanted] * 4, rtol=1e-4, atol=1e-6)  # float32


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_loss_that_drops_values_is_not_taken_for_one_that_ignores_its_gradient(num_devices):
    trained(lambda output, label: nd.Dropout(output, p=0.5).mean(axis=(1, 2, 3)), [6, 5], num_devices)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_loss_that_cannot_be_called_in_predict_mode_is_taken_at_its_word(num_devices):
    def loss(output, label):
        assert mx.autograd.is_training()
        return softmax_output("valid")(output, label)

    trained(loss, [6], num_devices)


@pytest.mark.parametrize("kind", ["pipeline", "asynchronous"])
def test_pipelines_and_asynchronous_training_refuse_it_too(kind):
    def make():
        net = gluon.nn.HybridSequential()
        net.add(gluon.nn.Conv2D(2, 1, in_channels=3), gluon.nn.Conv2D(4, 1, in_channels=2))
        net.initialize()
        return net

    loss, devices = softmax_output("valid"), [mx.cpu(0), mx.cpu(1)]
    with pytest.raises(gp.errors.BatchMismatch, match="does not follow from the gradient that it gets"):
        if kind == "pipeline":
            pipe = gp.Pipeline(make(), devices, 2)
            pipe.step(loss, gluon.Trainer(pipe.collect_params(), "sgd"), nd.array(X), nd.array(Y))
        else:
            gp.asynchronous.Asynchronous(make, loss, devices, "sync", "sgd").train([(X, Y)] * 2)
