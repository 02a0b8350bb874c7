"""Labels that are no class of the net's outputs end the training, in every step."""

import threading

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.mxnet.engine import push
from mxnet import gluon, nd

CROSS_ENTROPY = gluon.loss.SoftmaxCrossEntropyLoss()
GOOD = [0, 1, 2, 0, 1, 2]


def dense(units=3):
    net = gluon.nn.Dense(units, in_units=4)
    net.initialize(ctx=gp.devices("cpu:2"))
    return net


def step_of(net, loss=CROSS_ENTROPY, **options):
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    return gp.DataParallel(net, loss, trainer, **options)


def with_label(label, place=1, dtype="float32"):
    labels = np.array(GOOD, dtype)
    labels[place] = label
    return nd.array(labels, dtype=dtype)


def weight_of(step):
    return step.net.weight.data(step.devices[0]).asnumpy()


WHOLE = ["float32", "float64", "float16", "int32", "int64", "int8", "uint8"]


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize(
    ("dtype", "label", "said"),
    [*((dtype, 7, "7") for dtype in WHOLE), *((dtype, -1, "-1") for dtype in WHOLE if dtype != "uint8")]
    + [(dtype, 1.5, "1.5") for dtype in WHOLE[:3]]
    + [("float32", np.nan, "nan"), ("float64", np.inf, "inf"), ("int32", 123456789, "123456789")],
)
def test_a_label_that_is_no_class_ends_its_step_before_anything_is_updated(dtype, label, said, num_before):
    step, x = step_of(dense()), nd.ones((6, 4))
    for _ in range(num_before):
        step(x, nd.array(GOOD, dtype=dtype))
    before = weight_of(step)
    message = rf"step {num_before + 1}: the label of sample 1 .* is {said}, which is no class: .* the classes 0 to 2"
    with pytest.raises(gp.errors.BatchMismatch, match=message):
        step(x, with_label(label, dtype=dtype))
    np.testing.assert_array_equal(weight_of(step), before)
    step(x, nd.array(GOOD, dtype=dtype))  # the loop may go on
    step.update()
    assert (weight_of(step) != before).any()


def test_a_label_on_a_later_device_is_named_by_its_place_in_the_batch():
    step, x = step_of(dense()), nd.ones((6, 4))
    step(x, nd.array(GOOD))
    with pytest.raises(gp.errors.BatchMismatch, match="step 2: the label of sample 4 .* is 3"):
        step(x, with_label(3, place=4))
        step.update()  # the label may be on its way to the device when the step ends


@pytest.mark.parametrize("end", ["step", "update"])
def test_a_label_that_is_not_there_yet_is_not_waited_for_and_ends_a_later_step(end):
    step, x, labels, may_go_on = step_of(dense()), nd.ones((6, 4)), with_label(9, place=5), threading.Event()
    step(x, nd.array(GOOD))
    push(may_go_on.wait, write=[labels])
    step(x, labels)
    may_go_on.set()
    mx.nd.waitall()
    with pytest.raises(gp.errors.BatchMismatch, match=r"step 2: the label of sample 5 .* is 9,.* go back to a check"):
        step.update() if end == "update" else step(x, nd.array(GOOD))


def test_update_waits_for_the_labels():
    step, x, labels, may_go_on = step_of(dense(), accumulate=2), nd.ones((6, 4)), with_label(9), threading.Event()
    for _ in range(2):
        step(x, nd.array(GOOD))
    push(may_go_on.wait, write=[labels])  # in the place of a worker of the engine: the first update would wait for it
    step(x, labels)
    threading.Timer(0.05, may_go_on.set).start()
    with pytest.raises(gp.errors.BatchMismatch, match="step 3: the label of sample 1"):
        step.update()


def test_labels_of_tokens_are_named_by_their_sample():
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(3, in_units=4, flatten=False))
    net.initialize(ctx=gp.devices("cpu:2"))
    step, x = step_of(net), nd.ones((5, 7, 4))
    labels = nd.ones((5, 7))
    step(x, labels)
    labels[3, 6] = 3
    with pytest.raises(gp.errors.BatchMismatch, match="label of sample 3 .* is 3"):
        step(x, labels)
        step.update()


def test_half_precision_labels_of_more_classes_than_it_can_count_are_left_alone():
    step, x = step_of(dense(4097)), nd.ones((6, 4))
    labels = nd.array([4096] * 6, dtype="float16")  # also what 4095 and 4097 are
    for _ in range(2):
        step(x, labels)
    step.update()


def test_what_a_weight_leaves_out_may_have_any_label():
    step, x = step_of(dense()), nd.ones((6, 4))
    for _ in range(2):
        step(x, (with_label(-1), nd.array([[1], [1], [1], [1], [0], [1]])))
    step.update()


def test_classes_are_counted_anew_in_each_step():
    """As in contrastive losses, whose classes are the samples of the batch."""

    class Against(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.dense = gluon.nn.Dense(4, in_units=4)

        def hybrid_forward(self, F, x):
            return F.dot(self.dense(x), x, transpose_b=True)

    net = Against()
    net.initialize(ctx=mx.cpu(0))
    step = step_of(net)
    for num in (3, 6, 4):
        step(nd.ones((num, 4)), nd.arange(num))
    with pytest.raises(gp.errors.BatchMismatch, match="sample 2 .* is 3"):
        step(nd.ones((3, 4)), nd.array([0, 1, 3]))


def pixels(loss, void, label):
    net = gluon.nn.Conv2D(3, 1, in_channels=2)
    net.initialize(ctx=gp.devices("cpu:2"))
    step, x, masks = step_of(net, loss), nd.ones((4, 2, 3, 3)), np.full((4, 3, 3), void, np.float32)
    masks[:, 1] = 2
    step(x, nd.array(masks))
    masks[2, 1, 1] = label
    step(x, nd.array(masks))
    step.update()


@pytest.mark.filterwarnings("ignore:distutils Version classes:DeprecationWarning")  # of GluonCV's import
def test_the_masks_of_segmentation_are_looked_at_but_for_void_pixels():
    from gluoncv.loss import MixSoftmaxCrossEntropyLoss

    theirs = MixSoftmaxCrossEntropyLoss(aux=False, size_average=False, ignore_label=255)
    for loss, void, other in ((gp.models.PixelLoss(), -1, 3), (theirs, 255, -1)):
        pixels(loss, void, 1)
        message = rf"step 2: .* sample 2 .* is {other},.* classes 0 to 2 \(or {void}, which is left out\)"
        with pytest.raises(gp.errors.BatchMismatch, match=message):
            pixels(loss, void, other)


def test_a_loss_of_ones_own_may_say_where_its_classes_are():
    def smooth(output, label):
        return CROSS_ENTROPY(output, label) - 0.1 * nd.log_softmax(output).mean(axis=1)

    def steps():
        step, x = step_of(dense(), smooth), nd.ones((6, 4))
        step(x, nd.array(GOOD))
        step(x, with_label(3))
        step.update()

    steps()
    smooth.class_axis = 1
    with pytest.raises(gp.errors.BatchMismatch, match="is 3, which is no class"):
        steps()


def test_probabilities_and_other_losses_are_left_alone():
    for loss in (gluon.loss.SoftmaxCrossEntropyLoss(sparse_label=False), gluon.loss.L2Loss()):
        step, x = step_of(dense(), loss), nd.ones((6, 4))
        for _ in range(2):
            step(x, nd.full((6, 3), 7))
        step.update()


@pytest.mark.parametrize("place", range(7))
def test_a_pipeline_names_the_sample_in_the_whole_batch(place):
    stages = [gluon.nn.Dense(4, in_units=4), gluon.nn.Dense(3, in_units=4)]
    for stage in stages:
        stage.initialize()
    pipe = gp.Pipeline(stages, [[mx.cpu(0), mx.cpu(1)], [mx.cpu(2), mx.cpu(3)]], 2)
    trainer = gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0.1})
    x, labels = nd.ones((7, 4)), np.array([*GOOD, 0], np.float32)
    num_before = place % 2  # the first step looks too
    for _ in range(num_before):
        pipe.step(CROSS_ENTROPY, trainer, x, nd.array(labels))
    labels[place] = 5
    with pytest.raises(gp.errors.BatchMismatch, match=f"step {num_before + 1}: the label of sample {place} .* is 5"):
        pipe.step(CROSS_ENTROPY, trainer, x, nd.array(labels))
        pipe.update()
