# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 6. Faster R-CNN on two devices
#
# *From a batch with ragged boxes to mean average precision, on scenes of handwritten digits.*
#
# Classifying digits was easy on several devices: every image has one label, every sample one loss, and the mean over
# the batch is the mean over the samples. Detection breaks each of these habits. An image has any number of boxes, the
# net draws at random what it learns from, and its loss is divided by counts that are known only when the forward pass
# is over. This notebook shows how one step over two devices stays one step on the whole batch all the same.

# %%
# %matplotlib inline
import tempfile
import warnings

import matplotlib.pyplot as plt
import numpy as np

import gluon_parallel as gp  # before MXNet: it makes MXNet 1.9.1 run on today's Python
import mxnet as mx
from mxnet import gluon, nd

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
devices = gp.devices("cpu:2")
rcnn = gp.models.faster_rcnn  # built on GluonCV, which is imported here

from gluoncv.utils.metrics import VOC07MApMetric

# %% [markdown]
# ## Scenes
#
# Handwritten digits of scikit-learn, tinted, of many sizes, on photographs; the digits of the test scenes occur in no
# training scene. They are written as a data set in the layout of Pascal VOC, and read as that one would be.

# %% tags=["photographs"]
SIZE = 96
folder = tempfile.TemporaryDirectory()
scenes = gp.datasets.scenes
path = scenes.write(folder.name, num_train=640, num_test=60, size=SIZE)
train_set, test_set = (
    gp.datasets.voc.Detection(path, part, scenes.CLASSES, in_memory=True) for part in ("train", "test")
)
print(train_set.report)

nothing = np.zeros((0, 6))
rows = [gp.pictures.boxes(*train_set[number], nothing)[:2] for number in range(3)]
gp.pictures.draw(rows, scenes.CLASSES, titles=("image", "truth"), across=3)

# %% [markdown]
# ## Ragged boxes
#
# One image has one box, another has five. Arrays are rectangular, so the boxes are padded: with $-1$, which is no box
# and no class. All batches get the same number of rows; why that matters comes further down.

# %%
MAX_BOXES = 8
labels = [train_set[number][1] for number in range(6)]
print("boxes per image:", [len(label) for label in labels])
print(gp.datasets.detection.pad(labels, MAX_BOXES)[2])

# %% [markdown]
# Padded boxes are cut along the images like anything else: the first device gets its images, their boxes, and
# whatever else belongs to them.

# %%
batch = (np.stack([train_set[number][0] for number in range(5)]), gp.datasets.detection.pad(labels[:5], MAX_BOXES))
for shard_images, shard_boxes in gp.split_and_load(batch, devices):
    print(shard_images.context, shard_images.shape, shard_boxes.shape)

# %% [markdown]
# ## Two stages, two sets of targets
#
# Faster R-CNN looks twice. The *region proposal network* (RPN) slides over the features and says for each of many
# *anchors*, boxes of a few shapes at every place, whether there is an object, and how to move the anchor onto it. The
# best of these *proposals* are cut out of the features, and the *head* says which class each shows, and corrects its
# box once more.
#
# An anchor learns "object" if it overlaps one by half, "background" if it overlaps none by more than 0.3, and nothing
# in between. There are hundreds of times more of the second kind, so 64 anchors are drawn per image, at most half of
# them objects. GluonCV assigns them; `Targets` adds the drawing.


# %%
def make_net(contexts, norm="sync_batch_norm", seed=1):
    gp.reseed(seed)
    net = rcnn.small(scenes.CLASSES, norm, MAX_BOXES, channels=24)
    net.initialize(mx.init.Xavier(), ctx=contexts)
    return net


net = make_net(devices)
targets = rcnn.Targets(net, MAX_BOXES, gp.datasets.pictures.as_input, num_sample=64, pos_iou=0.5, neg_iou=0.3)
anchors = targets.anchors(SIZE, SIZE)
image, label = train_set[2]
kinds, _, _ = targets.targets(label[:, :4], anchors, (SIZE, SIZE), np.random.RandomState(0))
print(f"{len(anchors)} anchors: {(kinds == 1).sum()} drawn for objects, {(kinds == 0).sum()} for background")

# %% tags=["photographs"]
figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
for axis, title, boxes, colour in [
    (axes[0], "truth", label[:, :4], "#c8102e"),
    (axes[1], "anchors for objects", anchors[kinds == 1], "#2a6f97"),
    (axes[2], "anchors for background", anchors[kinds == 0], "#e0a800"),
]:
    axis.imshow(image)
    for left, top, right, bottom in boxes:
        axis.plot([left, right, right, left, left], [top, top, bottom, bottom, top], color=colour, linewidth=1)
    axis.set_title(title)
    axis.set_axis_off()
plt.show()

# %% [markdown]
# ## Whose random numbers?
#
# The head's proposals are drawn too, 32 per image, after the RPN has spoken. GluonCV draws the anchors from NumPy's
# global generator and the proposals from the device's own. Then what an image learns from depends on the images before
# it, on the device it is on, and on who else asked for a number. Two devices could never repeat what one does, nor
# could a resumed run.
#
# Here the numbers belong to the *sample*: they follow from (seed, epoch, number of the image), and travel with it
# through the split. That is the fourth input, as many numbers as there can be proposals. They are assigned to
# proposals and padded boxes in turn, and that is why every batch has the same number of rows.


# %%
def loader(batch_size, last_batch="discard"):
    return gp.datasets.samples.SampleBatches(
        train_set, targets.collate, batch_size, targets.mark(lambda image, label, random: (image, label)), shuffle=True,
        seed=0, last_batch=last_batch,
    )  # fmt: skip


images, boxes, classes, draws, *rpn_labels = next(iter(loader(16)))
names = ["images", "boxes", "classes", "draws", *rcnn.Labels._fields]
for name, array in zip(names, [images, boxes, classes, draws, *rpn_labels]):
    print(f"{name:14}{array.shape}")

# %% [markdown]
# ## A loss that is not a mean over samples
#
# There are four losses: scores and boxes of the RPN, classes and boxes of the head. Each is a sum over anchors or
# proposals, divided by how many of them count. An image gives 64 anchors, but one with few free places gives fewer;
# and how many proposals count is known only when the RPN has made them. If every device divides by its *own* count
# and the gradients are averaged, as GluonCV's script does, we are back at the mean of means:
#
# $$\frac12\left(\frac{s_1}{n_1}+\frac{s_2}{n_2}\right)\quad\text{instead of}\quad\frac{s_1+s_2}{n_1+n_2}.$$
#
# Therefore `rcnn.Loss` returns neither, but the pairs $(s, n)$. `gp.DataParallel` adds up the counts of all devices
# (and processes) and starts the backward pass of each sum with $1/(n_1+n_2)$. That is an array like any other: the
# engine fills it in when both forward passes are through, and Python does not wait.

# %%
training = rcnn.Training(net)
shard = [nd.array(array, ctx=devices[0]) for array in (images[:2], boxes[:2], classes[:2], draws[:2])]
with mx.autograd.train_mode(), gp.nn.participants(training, devices[:1]):  # batch norm does not wait for the other
    outputs = training(*shard)
    pairs = rcnn.Loss()(*outputs, *(nd.array(array[:2], ctx=devices[0]) for array in rpn_labels))
for name, (total, count) in zip(rcnn.Loss.parts, pairs):
    print(f"{name:12}{total.asscalar():9.3f} / {count.asscalar():3.0f} = {(total / count).asscalar():.3f}")

# %% [markdown]
# ## Two devices against one
#
# Seven images with different numbers of boxes, one image without any. On two devices the shards have four and three.
# Batch norm is synchronised, so that both look at the same statistics. Three steps, from the same weights:


# %%
def follow(contexts, norm="sync_batch_norm", steps=3):
    net = make_net(contexts, norm)
    training = gp.nn.convert_for_cpu(rcnn.Training(net))  # faster, with the same values
    training.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    step = gp.DataParallel(training, rcnn.Loss(), trainer)
    batch = [array[:7].copy() for array in (images, boxes, classes, draws, *rpn_labels)]
    batch[1][3], batch[2][3] = -1, -1  # the fourth image shows nothing
    return [step(batch[:4], batch[4:]).asscalar() for _ in range(steps)]


warnings.simplefilter("ignore", gp.errors.StatisticsPerDevice)  # of the last line, which means it
print("one device: ", *(f"{loss:.6f}" for loss in follow(devices[:1])))
print("two devices:", *(f"{loss:.6f}" for loss in follow(devices)))
print("two devices, batch norm of its own on each:", *(f"{loss:.6f}" for loss in follow(devices, "batch_norm")))

# %% [markdown]
# ## Training
#
# From random weights, with the learning rate rising over the first steps and falling at the end. Five epochs of 640
# small scenes, eight to a step, show that it learns; the script (`scripts/train_faster_rcnn.py`) takes 2,400 scenes of
# 128 pixels.

# %%
training.hybridize()
trainer = gluon.Trainer(net.collect_train_params(), "sgd", {"learning_rate": 0.015, "momentum": 0.9, "wd": 5e-4})
step = gp.DataParallel(training, rcnn.Loss(), trainer, clip_global_norm=10)
schedule = mx.lr_scheduler.MultiFactorScheduler([319], 0.1, 0.015, warmup_steps=36, warmup_begin_lr=0.0015)
batches, history = loader(8), []
for epoch in range(5):
    for number, (*inputs, cls_target, box_target, box_mask) in enumerate(batches):
        trainer.set_learning_rate(schedule(epoch * len(batches) + number))
        step(inputs, (cls_target, box_target, box_mask))
        history.append(step.parts)  # arrays that nobody has waited for yet
    print(f"epoch {epoch + 1}: loss {sum(value.asscalar() for value in history[-1].values()):.3f}")

# %%
figure, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
titles = {"rpn_class": "RPN: scores", "rpn_box": "RPN: boxes", "head_class": "head: classes", "head_box": "head: boxes"}
for (name, title), colour in zip(titles.items(), ("#2a6f97", "#61a5c2", "#c8102e", "#e0a458")):
    values = np.array([parts[name].asscalar() for parts in history])
    axis.plot(np.convolve(values, np.ones(20) / 20, "valid"), color=colour, label=title)
axis.set(xlabel="step", ylabel="loss (mean of 20 steps)", ylim=(0, None))
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# The head's boxes get *worse* at first: while all proposals are called background, there is little to say about boxes.
#
# ## What it finds
#
# `detect` gives every device one image at a time, for images come in all sizes. Digits of these handwritings it has
# never seen.

# %% tags=["photographs"]
found = list(rcnn.detect(net, [gp.datasets.pictures.as_input([image])[0] for image, _ in test_set], devices))
rows = [gp.pictures.boxes(*test_set[number], found[number], threshold=0.4) for number in range(6)]
gp.pictures.draw(rows, scenes.CLASSES, across=2)

# %% [markdown]
# ## Mean average precision
#
# A prediction is right if its class is, and if it overlaps an object of that class by half that no surer prediction
# has claimed. Sort the predictions of one class by their score and go through them: after each one, *precision* is
# the share that was right, *recall* the share of all objects that has been found. The area below that curve is the
# average precision, and its mean over the classes is the number that detectors are compared by.
#
# It is no mean over images, so processes cannot average theirs: `gp.metrics.merge(metric, store)` brings the records
# of all processes together, and sorts them.

# %%
metric = VOC07MApMetric(iou_thresh=0.5, class_names=list(scenes.CLASSES))
for (_, label), rows in zip(test_set, found):
    metric.update(
        *(part[None] for part in (rows[:, :4], rows[:, 4], rows[:, 5], label[:, :4], label[:, 4], label[:, 5]))
    )
values = dict(gp.metrics.merge(metric, mx.kv.create("local")).get_name_value())
figure, axis = plt.subplots(figsize=(9, 2.6), layout="constrained")
axis.bar(scenes.CLASSES, [values[name] for name in scenes.CLASSES], color="#9aa5b1")
axis.axhline(values["mAP"], color="#c8102e")
axis.set(xlabel="digit", ylabel="average precision", ylim=(0, 1), title=f"mAP {values['mAP']:.1%}")
plt.show()
folder.cleanup()

# %% [markdown]
# With `make train TASK=faster_rcnn`, a wider net with larger and more scenes passes 80 % in its third epoch.
#
# ## Exercises
#
# 1. Exchange the draws of a batch for other random numbers. By how much does the loss change? Is the change larger or
#    smaller than that from one batch to the next?
# 2. Let `Loss` return `(s / n, 1)` per device. What is then divided by what?
# 3. Why would `flip`, which mirrors images, harm here, and for which digits would it not?
#
# <details><summary>Answers</summary>
#
# 1. With untrained weights and a batch of 16, by 0.001 of 3.65; from one batch to the next it changes by 0.06. Most
#    of the loss comes from anchors and proposals of the same kind, whichever are drawn.
# 2. The sum of both devices' means by the number of devices, 2: the mean of means that the formula above warns of. A
#    device with few proposals that count would weigh as much as one with many.
# 3. A mirrored 2 is no 2, but is still called one. Only digits that are nearly symmetric, 0, 8 and often 1, stay what
#    they are.
#
# </details>
