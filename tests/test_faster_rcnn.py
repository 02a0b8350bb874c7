"""Faster R-CNN's targets and losses are GluonCV's, and devices together do what one does with the whole batch."""

import contextlib
import hashlib
import importlib
import sys
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

gluoncv = pytest.importorskip("gluoncv", reason="GluonCV is an optional dependency")
faster_rcnn = gp.models.faster_rcnn
Chooser = importlib.import_module("gluon_parallel.models.faster_rcnn.targets").Chooser
ForwardBackwardTask = importlib.import_module("gluoncv.model_zoo.rcnn.faster_rcnn.data_parallel").ForwardBackwardTask
RPNTargetGenerator = gluoncv.model_zoo.rcnn.rpn.rpn_target.RPNTargetGenerator
RCNNTargetGenerator = gluoncv.model_zoo.rcnn.faster_rcnn.rcnn_target.RCNNTargetGenerator
Activation = gluon.nn.Activation
RCNNTargetSampler = gluoncv.model_zoo.rcnn.faster_rcnn.rcnn_target.RCNNTargetSampler

CLASSES = ("circle", "square", "star")
MAX_BOXES = 5


def small(devices=None, norm="none", seed=3, **options):
    """A net of few channels, from the same weights on every call."""
    gp.reseed(seed)
    net = faster_rcnn.small(CLASSES, norm, MAX_BOXES, channels=8, **options)
    net.initialize(mx.init.Xavier(), ctx=devices)
    for _ in faster_rcnn.detect(net, [np.zeros((3, 64, 64), np.float32)], [mx.cpu(0)]):
        pass  # GluonCV's layers know their shapes from now on
    # A new RPN gives all anchors almost the same score, so that rounding would decide which are the best.
    net.rpn.score.weight.set_data(100 * net.rpn.score.weight.data(mx.cpu(0)))
    return net


def boxes_of(rng, number, size=96):
    """(number, 6) float32: boxes of 14 to 50 pixels within an image of that size."""
    side = rng.uniform(14, 50, (number, 2))
    corner = rng.uniform(0, 1, (number, 2)) * (size - 1 - side)
    rows = [corner, corner + side, rng.integers(0, len(CLASSES), (number, 1)), np.zeros((number, 1))]
    return np.concatenate(rows, axis=1).astype(np.float32)


def as_input(images):
    return np.stack([image.transpose(2, 0, 1) for image in images]).astype(np.float32) / 128 - 1


def make_targets(net, num_sample=32):
    return faster_rcnn.Targets(net, MAX_BOXES, as_input, num_sample, pos_iou=0.5, neg_iou=0.3)


def make_batch(rng, numbers, targets, size=96):
    """Images with so many boxes each, as Inputs and Labels."""
    samples = [
        (
            rng.integers(0, 256, (size, size, 3), dtype=np.uint8),
            boxes_of(rng, number, size),
            np.random.RandomState(rng.integers(2**31)),
        )
        for number in numbers
    ]
    return targets.collate(samples)


@pytest.mark.parametrize("number", [0, 1, 3, 5])
def test_anchors_get_the_targets_that_gluoncv_gives_them(rng, number):
    net = small()
    # More than there are, so that none is drawn: then nothing is random in either.
    targets = make_targets(net, num_sample=100_000)
    anchors, label = targets.anchors(96, 96), boxes_of(rng, number)
    got = targets.targets(label[:, :4], anchors, (96, 96), np.random.RandomState(0))
    boxes = label[:, :4] if number else np.full((1, 4), -1, np.float32)  # MXNet has no arrays without rows
    with np.errstate(divide="ignore"):  # padding has no area
        wanted = RPNTargetGenerator(200_000, 0.5, 0.3)(nd.array(boxes), nd.array(anchors), 96, 96)
    for ours, theirs in zip(got, wanted):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert (got[0] == 1).any() == (number > 0)
    beyond = targets.targets(label[:, :4], anchors, (2, 2), np.random.RandomState(0))[0]
    assert (beyond == -1).all()  # all anchors reach beyond so small an image


def test_as_many_anchors_as_wanted_are_drawn_from_gluoncvs_and_the_draw_belongs_to_the_sample(rng):
    net, label = small(), boxes_of(rng, 4)
    targets, every = make_targets(net, num_sample=16), make_targets(net, num_sample=100_000)
    with mx.autograd.train_mode():
        *_, wanted = net.rpn(nd.zeros((1, 3, 96, 128)), net.features(nd.zeros((1, 3, 96, 128))))
    np.testing.assert_array_equal(targets.anchors(96, 128), wanted.asnumpy()[0])
    anchors = targets.anchors(96, 96)
    kinds, _, mask = targets.targets(label[:, :4], anchors, (96, 96), np.random.RandomState(5))
    again, _, _ = targets.targets(label[:, :4], anchors, (96, 96), np.random.RandomState(5))
    other, _, _ = targets.targets(label[:, :4], anchors, (96, 96), np.random.RandomState(6))
    whole, _, _ = every.targets(label[:, :4], anchors, (96, 96), np.random.RandomState(5))
    assert (kinds >= 0).sum() == 16 and 0 < (kinds == 1).sum() <= 8
    assert (kinds[kinds >= 0] == whole[kinds >= 0]).all()
    np.testing.assert_array_equal(kinds, again)
    assert (kinds != other).any()
    np.testing.assert_array_equal(mask[:, 0], kinds == 1)


def stable_argsort(array, axis=-1, is_ascend=True):
    """MXNet's argsort, which leaves equal values in any order, with those in the order in which they come."""
    values = array.asnumpy()
    return nd.array(np.argsort(values if is_ascend else -values, axis=axis, kind="stable"))


def gluoncv_with(draws):
    """While this holds, GluonCV's targets are drawn with `draws`, and equal values stay in their order."""
    patches = contextlib.ExitStack()
    patches.enter_context(mock.patch.object(nd.random, "uniform", lambda *_arguments, **_options: nd.array(draws)))
    patches.enter_context(mock.patch.object(nd, "argsort", stable_argsort))
    return patches


@pytest.mark.parametrize("number", [0, 1, 3, 5])
@pytest.mark.parametrize("num_rois", [60, 30])  # enough of them, and so few that some do not count
def test_proposals_get_the_targets_that_gluoncv_gives_them(rng, number, num_rois):
    net = small()
    choose = Chooser(net)
    label = np.full((MAX_BOXES, 5), -1, np.float32)
    label[:number] = boxes_of(rng, number)[:, :5]
    near = label[rng.integers(0, max(number, 1), num_rois // 3), :4] + rng.uniform(-4, 4, (num_rois // 3, 4))
    rois = np.concatenate([near, boxes_of(rng, num_rois - num_rois // 3)[:, :4]]).astype(np.float32)
    scores = rng.uniform(0, 1, num_rois).astype(np.float32)
    rois[-4:], scores[-4:] = -1, -1  # what non-maximum suppression leaves where there is nothing more
    draws = rng.uniform(0, 1, num_rois + MAX_BOXES).astype(np.float32)

    num_sample, max_positive = net._num_sample, choose.num_boxes
    sampler = RCNNTargetSampler(1, num_rois, num_sample, 0.5, max_positive / num_sample, MAX_BOXES)
    generator = RCNNTargetGenerator(len(CLASSES), max_positive)
    generator.initialize()
    gt_box, gt_class = nd.array(label[None, :, :4]), nd.array(label[None, :, 4:])
    with gluoncv_with(draws):
        sampled = sampler(nd.array(rois[None]), nd.array(scores[None, :, None]), gt_box)
        wanted = generator(*sampled, gt_class, gt_box)

    got = choose(rois, scores, label[:, :4], label[:, 4], draws)
    np.testing.assert_array_equal(got.rois, sampled[0][0].asnumpy())
    for ours, theirs in zip([got.classes, got.indices, got.mask], [wanted[0], wanted[3], wanted[2]]):
        np.testing.assert_array_equal(ours, theirs[0].asnumpy())
    counts = got.mask > 0  # elsewhere a target is of no consequence
    np.testing.assert_allclose(got.boxes[counts], wanted[1][0].asnumpy()[counts], rtol=1e-4, atol=1e-5)
    assert (got.classes > 0).any() == (number > 0)


def theirs(net, batch):
    """GluonCV's losses and gradients of one image, by its own forward pass and its own training task."""
    images, boxes, classes, draws, *labels = map(nd.array, batch)
    trainer = gluon.Trainer(net.collect_train_params(), "sgd", {"learning_rate": 0.0})
    losses = [gluon.loss.SigmoidBinaryCrossEntropyLoss(from_sigmoid=False), gluon.loss.HuberLoss(rho=1 / 9),
              gluon.loss.SoftmaxCrossEntropyLoss(), gluon.loss.HuberLoss()]  # fmt: skip
    task = ForwardBackwardTask(net, trainer, *losses, mix_ratio=1.0, amp_enabled=False)
    with gluoncv_with(batch[3][0]):
        measured = task.forward_backward((images, nd.concat(boxes, classes, dim=2), *labels))
    return [value.asscalar() for value in measured[:4]], gradients(net)


def gradients(net, device=None):
    return [p.grad(device).asnumpy() for p in net.collect_train_params().values() if p.grad_req != "null"]


@pytest.mark.parametrize("number", [0, 3])
def test_losses_and_gradients_are_those_of_gluoncvs_own_training(rng, number):
    net = small()
    training = faster_rcnn.Training(net)
    batch = make_batch(rng, [number], make_targets(net, num_sample=24))  # not as many as proposals
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.0})
    step = gp.DataParallel(training, faster_rcnn.Loss(), trainer)
    loss = step(batch[:4], batch[4:])
    ours = gradients(net)
    wanted, their_gradients = theirs(net, batch)
    np.testing.assert_allclose([value.asscalar() for value in step.parts.values()], wanted, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss.asscalar(), sum(wanted), rtol=1e-4, atol=1e-6)
    for mine, other in zip(ours, their_gradients):
        np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-5)  # float32 sums in another order


def train(devices, batches, norm="sync_batch_norm", hybridize=True, store=None, smooth=False):
    """The losses of some steps, the loss's parts, and the weights after them.

    Args:
        smooth: no activation has a kink, at which rounding would decide whether a gradient passes or not.
    """
    net = small(devices, norm)
    if smooth:
        net.apply(lambda block: setattr(block, "_act_type", "softrelu") if isinstance(block, Activation) else None)
    training = faster_rcnn.Training(net)
    if hybridize:
        training.hybridize()
    optimizer = {"learning_rate": 0.01, "momentum": 0.9}
    trainer = gluon.Trainer(net.collect_train_params(), "sgd", optimizer, kvstore=store)
    step = gp.DataParallel(training, faster_rcnn.Loss(), trainer)
    losses, parts = [], []
    for batch in batches:
        losses.append(step(batch[:4], batch[4:]).asscalar())
        parts.append([value.asscalar() for value in step.parts.values()])
    weights = [parameter.data(devices[0]).asnumpy() for parameter in net.collect_params().values()]
    return np.array(losses), np.array(parts), weights


@contextlib.contextmanager
def the_first_choice(known):
    """While this holds, the proposals of an image are those that were chosen for it when it was seen first.

    GluonCV's nets compute in float32 alone, and rounding may make another of two almost equal proposals the better one:
    in one image of some hundred. Without that, everything else can be compared closely.

    Args:
        known: dict, what was chosen for each image.

    Yields:
        A list: for each image, whether the same would have been chosen now.
    """
    choose, same = Chooser.__call__, []

    def choose_first(self, rois, scores, boxes, classes, draws):
        now = choose(self, rois, scores, boxes, classes, draws)
        first = known.setdefault((boxes.tobytes(), draws.tobytes()), now)
        same.append(np.array_equal(now.classes, first.classes) and np.allclose(now.rois, first.rois, atol=1e-2))
        return first

    with mock.patch.object(Chooser, "__call__", choose_first):
        yield same


def assert_same_training(wanted, got, start):
    """Losses, their parts and weights agree; what a weight may differ by is measured by how far training moved it."""
    for ours, theirs in zip(wanted[:2], got[:2]):
        np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
    for index, (before, ours, theirs) in enumerate(zip(start, wanted[2], got[2])):
        moved, apart = np.linalg.norm(ours - before), np.linalg.norm(theirs - ours)
        # float32 keeps some five digits of so short a way: a step changes a weight by about its thousandth
        assert apart <= 1e-3 * moved, f"array {index} of shape {ours.shape} moved by {moved}, and {apart} elsewhere"


@pytest.mark.parametrize(("num_devices", "hybridize"), [(2, True), (3, True), (2, False)])
def test_devices_follow_one_device_step_by_step_with_ragged_boxes_and_shards(rng, num_devices, hybridize):
    targets, known = make_targets(small()), {}
    # An image without boxes, shards of different sizes, and a batch smaller than the number of devices.
    num_boxes = [(2, 0, 3, 1, 5), (4, 1, 2), (1,), (0, 2, 2, 3)]
    batches = [make_batch(rng, numbers, targets) for numbers in num_boxes]
    one, several = [mx.cpu(0)], [mx.cpu(i) for i in range(num_devices)]
    with the_first_choice(known):
        wanted = train(one, batches, smooth=True)
    with the_first_choice(known) as same:
        got = train(several, batches, hybridize=hybridize, smooth=True)
    assert_same_training(wanted, got, start=train(one, [], smooth=True)[2])
    assert len(known) == len(same) == sum(map(len, num_boxes))
    assert sum(same) >= len(same) - 3, same  # on their own they choose alike, too


@pytest.mark.parametrize(("numbers", "num_sample"), [((0, 0, 0), 32), ((2,) * 32, 16)])
def test_training_stays_finite_without_any_box_and_with_many_images_per_device(rng, numbers, num_sample):
    # Two devices wait for each other in batch norm; GluonCV's own targets would have taken some 40 buffers per image.
    batches = [make_batch(rng, numbers, make_targets(small(), num_sample))] * 2
    losses, parts, weights = train([mx.cpu(0), mx.cpu(1)], batches[: 2 - any(numbers)])
    assert np.isfinite(losses).all() and all(np.isfinite(weight).all() for weight in weights)
    assert (parts[:, [1, 3]] == 0).all() == (not any(numbers))  # there is no box to find


def test_what_is_found_comes_in_the_images_order_the_surest_first_and_within_the_image(rng):
    devices = [mx.cpu(0), mx.cpu(1)]
    net = small(devices)
    images = [rng.standard_normal((3, *size)).astype(np.float32) for size in [(96, 96), (64, 128), (96, 64)]]
    found = list(faster_rcnn.detect(net, images, devices, most=7))
    assert len(found) == 3
    for image, rows in zip(images, found):
        [alone] = faster_rcnn.detect(net, [image], devices[:1], most=7)
        np.testing.assert_allclose(rows, alone, rtol=1e-4, atol=1e-4)
        assert len(rows) <= 7 and (np.diff(rows[:, 5]) <= 0).all() and (rows[:, 4] >= 0).all()
        assert (rows[:, :4] >= 0).all() and (rows[:, [0, 2]] < image.shape[2]).all()


def test_what_is_not_there_or_does_not_fit_is_refused_by_name(rng):
    with pytest.raises(gp.errors.DatasetCorrupt, match="6 boxes, more than max_boxes: 5"):
        make_batch(rng, [6], make_targets(small()))
    with pytest.raises(gp.errors.ConfigError, match="norm: 'layer' is none of sync_batch_norm"):
        faster_rcnn.small(CLASSES, "layer")
    with pytest.raises(gp.errors.ConfigError, match="there is no 'resnet'.*faster_rcnn_resnet50_v1b_voc"):
        faster_rcnn.from_zoo("resnet", CLASSES)


@pytest.fixture(scope="module")
def resnet_file(tmp_path_factory):
    """A file like GluonCV's of a ResNet-50's weights."""
    classifier = gluoncv.model_zoo.get_model("resnet50_v1b")
    classifier.initialize()
    classifier(nd.zeros((1, 3, 32, 32)))
    path = tmp_path_factory.mktemp("weights") / "resnet50_v1b.params"
    classifier.save_parameters(str(path))
    return path, {name: parameter.data().asnumpy() for name, parameter in classifier.collect_params().items()}


@pytest.mark.parametrize("name", ["faster_rcnn_resnet50_v1b_voc", "faster_rcnn_fpn_syncbn_resnet50_v1b_coco"])
def test_a_net_of_the_zoo_takes_its_backbone_from_a_file(name, resnet_file):
    path, weights = resnet_file
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # GluonCV's pyramid asks MXNet for types that it cannot know
        net = faster_rcnn.from_zoo(name, CLASSES, num_devices=2)
    devices = [mx.cpu(0), mx.cpu(1)]
    assert faster_rcnn.load_backbone(net, name, str(path), devices) == path
    loaded = [key for key, parameter in net.collect_params().items() if parameter._data is not None]
    assert len(loaded) > 200 and net.num_class == 3
    parameters = net.collect_params()
    for key in loaded[::40]:
        for device in devices:
            np.testing.assert_array_equal(parameters[key].data(device).asnumpy(), weights[key])


def test_weights_that_gluoncv_publishes_are_found_and_never_fetched(tmp_path, monkeypatch):
    model_store, content = gluoncv.model_zoo.model_store, b"0123"
    sha1 = hashlib.sha1(content).hexdigest()
    monkeypatch.setitem(model_store._model_sha1, "tiny", sha1)
    monkeypatch.setenv("MXNET_HOME", str(tmp_path))
    monkeypatch.setattr(sys.modules["gluoncv.utils.download"], "requests", None)  # whoever asks the network fails
    file = tmp_path / "models" / f"tiny-{sha1[:8]}.params"
    with pytest.raises(gp.errors.ConfigError, match=f"{file} is not there"):
        gp.models.published_weights("tiny")
    file.parent.mkdir()
    file.write_bytes(b"half of it")
    with pytest.raises(gp.errors.ConfigError, match=f"{file} is not the file that was published"):
        gp.models.published_weights("tiny")
    file.write_bytes(content)
    assert gp.models.published_weights("tiny") == file == Path(model_store.get_model_file("tiny"))
    with pytest.raises(gp.errors.ConfigError, match="no weights of 'huge'"):
        gp.models.published_weights("huge")


def test_weights_that_cannot_be_had_are_told_in_a_sentence(tmp_path, monkeypatch):
    name = "faster_rcnn_resnet50_v1b_voc"
    net = faster_rcnn.from_zoo(name, CLASSES)
    monkeypatch.setenv("MXNET_HOME", str(tmp_path))
    for kind, file, words in (
        (name, "zoo", r"resnet50_v1b are wanted, but .*params is not there\..*null"),
        (name, str(tmp_path / "nothing.params"), "nothing.params does not hold the weights of resnet50_v1b"),
        ("small", "zoo", "small has no backbone"),
    ):
        with pytest.raises(gp.errors.ConfigError, match=words):
            faster_rcnn.load_backbone(net, kind, file, [mx.cpu(0)])
