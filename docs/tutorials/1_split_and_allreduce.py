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
# # 1. Split and allreduce
#
# *Training one net on several devices, from scratch.*
#
# In data parallelism every device holds a **full copy of the net** and gets a **part of the batch**. Each computes the
# gradient of its own samples; before the update, the gradients of all devices are added up. Since all copies start from
# equal weights and apply equal sums, they end with equal weights, ready for the next batch.
#
# Only two parts of that need any code beyond ordinary training:
#
# | | what moves | how often |
# | --- | --- | --- |
# | **split** | samples, from the host to the devices | once per batch |
# | **allreduce** | gradients, from every device to every device | once per parameter and batch |
#
# We build a LeNet from plain arrays, so that nothing is hidden, and train it on handwritten digits. The next notebook
# does the same with Gluon, in a tenth of the lines.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np

import gluon_parallel as gp  # before MXNet: it makes MXNet 1.9.1 run on today's Python
import mxnet as mx
from mxnet import autograd, nd

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## The devices
#
# No GPU is needed. MXNet has as many CPU devices as you care to name; each is a worker of its own, and they compute
# at the same time as far as the cores reach. For GPUs write `"gpu:3"` here (or `"gpu"` for all of them) and change
# nothing else in this notebook. Three is a good number for learning: few batches divide by it.

# %%
devices = gp.devices("cpu:3")
print("running on:", devices)

# %% [markdown]
# ## The data
#
# scikit-learn carries 1,797 real handwritten digits, so nothing has to be downloaded. They come as NumPy arrays in
# the host's memory, 28 x 28 pixels each.

# %%
digits = gp.datasets.load("digits")
print("to train with:", digits.train.images.shape, " to test with:", digits.test.images.shape)

# %%
figure, axes = plt.subplots(1, 12, figsize=(9, 1.1))
for axis, image, label in zip(axes, *digits.train):
    axis.imshow(image[0], cmap="gray_r")
    axis.set_title(label)
    axis.axis("off")
plt.show()

# %% [markdown]
# ## The net
#
# A LeNet is eight arrays: four weights, four biases. We draw them on the host; no device knows them yet.


# %%
def init_params(scale=0.1):
    shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
    return [nd.random.normal(scale=scale, shape=shape) if len(shape) > 1 else nd.zeros(shape) for shape in shapes]


gp.reseed(0)
params = init_params()
print(f"{len(params)} arrays, {sum(param.size for param in params):,} numbers")

# %% [markdown]
# And it is a function of images and parameters. Note what is *not* in it: no device is mentioned. MXNet runs an
# operation where its inputs are, so arrays on `cpu(1)` make this function run on `cpu(1)`.


# %%
def lenet(images, params):
    """Logits, (N, 10), of images, (N, 1, 28, 28)."""
    w1, b1, w2, b2, w3, b3, w4, b4 = params
    h = nd.relu(nd.Convolution(images, w1, b1, kernel=(3, 3), num_filter=20))  # (N, 20, 26, 26)
    h = nd.Pooling(h, pool_type="avg", kernel=(2, 2), stride=(2, 2))  # (N, 20, 13, 13)
    h = nd.relu(nd.Convolution(h, w2, b2, kernel=(5, 5), num_filter=50))  # (N, 50, 9, 9)
    h = nd.Pooling(h, pool_type="avg", kernel=(2, 2), stride=(2, 2))  # (N, 50, 4, 4)
    h = nd.relu(nd.dot(nd.flatten(h), w3) + b3)  # (N, 128)
    return nd.dot(h, w4) + b4


def cross_entropy(logits, labels):
    """The loss of every sample, (N,)."""
    return -nd.pick(nd.log_softmax(logits), labels)


# %% [markdown]
# ## A copy for every device
#
# `attach_grad` reserves, beside each copy, memory for its gradient. From now on there are three nets, equal to the last
# bit. They have to stay equal.


# %%
def get_params(params, device):
    copies = [param.copyto(device) for param in params]
    for copy in copies:
        copy.attach_grad()
    return copies


device_params = [get_params(params, device) for device in devices]
for b4 in (copies[-1] for copies in device_params):
    print(f"bias of the last layer on {b4.context}, gradient {b4.grad.asnumpy()[:3]} ...")

# %% [markdown]
# ## Split
#
# The batch is cut along its first axis, and each shard goes straight to its device. Images and labels are cut alike.
# 32 does not divide by 3; then some shards are larger by one. Dropping the odd samples would be wrong (they are
# data), and so would be repeating some (they would count twice).

# %%
images, labels = digits.train.images[:32], digits.train.labels[:32]
shards = gp.split_and_load((images, labels), devices)
for x, y in shards:
    print(x.context, x.shape, y.shape)

# %% [markdown]
# ## Every device on its own
#
# Forward and backward pass, once per device. `gp.parallel_apply` calls a function once per shard, each time from the
# thread of that shard's device. The calls follow each other, but MXNet's operators only *queue* work and return: after
# the last call all three devices compute at the same time, and Python is free.
#
# One detail decides whether the sum will be right. `loss.backward()` of a vector differentiates the **sum** of its
# elements, not the mean. So each device holds a sum over its own samples, and sums of parts add up to the sum of the
# whole, whatever the sizes of the parts.


# %%
def compute_loss(images, labels, params):
    return cross_entropy(lenet(images, params), labels)


with autograd.record():
    losses = gp.parallel_apply(compute_loss, [(x, y, params) for (x, y), params in zip(shards, device_params)])
gp.parallel_apply(nd.NDArray.backward, losses)

for copies in device_params:
    print(f"gradient of the last bias on {copies[-1].context}:", copies[-1].grad.asnumpy()[:4].round(2))

# %% [markdown]
# Three devices, three gradients: each has seen other digits.
#
# ## Allreduce
#
# Now every device needs the sum. Written plainly, one device collects the gradients and then copies the sum to all:


# %%
def allreduce_by_hand(arrays):
    for array in arrays[1:]:
        arrays[0][:] += array.as_in_context(arrays[0].context)  # collect
    for array in arrays[1:]:
        arrays[0].copyto(array)  # hand out


example = [nd.array([10**i, 2 * 10**i], ctx=device) for i, device in enumerate(devices)]
print("before:", *(array.asnumpy() for array in example))
allreduce_by_hand(example)
print("after: ", *(array.asnumpy() for array in example))

# %% [markdown]
# Those five lines are correct. `gp.allreduce` has the same meaning
# and goes over the memory once instead of once per line; it also refuses arrays that do not belong together, by name,
# before it changes any. Like every MXNet operation it returns at once: the engine adds a gradient as soon as all its
# copies are complete, while earlier layers are still being differentiated.
#
# We keep copies of the gradients, from before and after, for the picture below.

# %%
own_gradients = [copies[0].grad.copy() for copies in device_params]  # of the first layer, as each device found it

for copies in zip(*device_params):  # one parameter: its copies on all devices
    gp.allreduce([copy.grad for copy in copies])

for copies in device_params:
    print(f"gradient of the last bias on {copies[-1].context}:", copies[-1].grad.asnumpy()[:4].round(2))

# %% [markdown]
# Now they are equal: the gradient of the sum of all 32 losses, on every device.
#
# ## What lives where
#
# Here is the whole step with the true numbers of the cells above. One row is one device. The coloured squares are the
# first layer's twenty 3 x 3 kernels: red is positive, blue is negative.


# %% [markdown]
# (The next cell only draws; nothing is lost by skipping it.)

# %%
COLOURS = ["#2a6f97", "#c8553d", "#588157", "#7b5ea7", "#b8860b", "#4a4e69", "#008080", "#a23b72"]


def mosaic(pictures, columns, gap=0):
    """Pictures of (N, height, width) as one, in rows of so many; what is left free is white."""
    pictures = np.pad(pictures, [(0, -len(pictures) % columns), (0, gap), (0, gap)], constant_values=np.nan)
    count, height, width = pictures.shape
    rows = pictures.reshape(count // columns, columns, height, width)
    return rows.transpose(0, 2, 1, 3).reshape(-1, columns * width)[: -gap or None, : -gap or None]


def draw_step(images, shards, weights, own, total, new_weights):
    """One row per device: its shard, and the first layer's weights and gradients on the way through one step."""
    count = len(shards)
    width, height, right, down = 2.0, 1.55, 3.0, 2.0  # of a panel, and from one panel to the next
    middle, batch_height = (count - 1) / 2, width * len(images) / 16
    top = max(height / 2, batch_height / 2 - middle * down)  # of what is highest, a panel or the batch
    limits = (-2 * middle * down - top - 0.1, top + 1.2)
    figure, axis = plt.subplots(figsize=(11, 11 * (limits[1] - limits[0]) / 17.9), layout="constrained")
    axis.axis("off")

    def panel(column, row, picture, colour, height=height, **how):
        x, y = column * right, -row * down
        box = (x, x + width, y - height / 2, y + height / 2)
        axis.imshow(picture, extent=box, aspect="equal", **how)
        axis.add_patch(plt.Rectangle((x, box[2]), width, height, fill=False, edgecolor=colour, linewidth=2))

    def arrow(start, end, colour, style="-|>"):
        axis.annotate("", end, start, arrowprops={"arrowstyle": style, "color": colour, "shrinkA": 2, "shrinkB": 2})

    panel(0, middle, mosaic(images[:, 0], 4), "black", height=batch_height, cmap="gray_r")
    for row, (shard, _) in enumerate(shards):
        colour, y = COLOURS[row % len(COLOURS)], -row * down
        panel(1, row, mosaic(shard.asnumpy()[:, 0], 4), colour, cmap="gray_r")
        for column, arrays in enumerate([weights, own, total, new_weights], start=2):
            limit = max(np.abs(array.asnumpy()).max() for array in arrays)
            kernels = mosaic(arrays[row].asnumpy()[:, 0], 5, gap=1)
            panel(column, row, kernels, colour, cmap="RdBu_r", vmin=-limit, vmax=limit)
        axis.text(5.05 * right + width, y, shard.context, color=colour, va="center", rotation=-90, fontweight="bold")
        arrow((width, -middle * down), (right, y), colour)
        for column in (1, 2, 4):
            arrow((column * right + width, y), ((column + 1) * right, y), colour)
        arrow((3 * right + width, y), (3.5 * right + width / 2, y), colour, style="-")  # to the line of the allreduce
        arrow((3.5 * right + width / 2, y), (4 * right, y), colour)
    axis.plot([3.5 * right + width / 2] * 2, [0, -(count - 1) * down], color="black", linewidth=3)

    titles = ["host", "shards", "weights", "own gradients", "summed gradients", "new weights"]
    subtitles = [f"batch of {len(images)}", "a part each", "equal", "all different", "equal", "equal"]
    for column, (title, subtitle) in enumerate(zip(titles, subtitles)):
        axis.text(column * right + width / 2, top + 0.97, title, ha="center", va="top", fontweight="bold")
        axis.text(column * right + width / 2, top + 0.57, subtitle, ha="center", va="top", color="#555555", fontsize=9)
    for column, verb in enumerate(["split", "forward", "backward", "allreduce", "SGD"], start=1):
        axis.text(column * right - 0.5, 0.12, verb, ha="center", fontstyle="italic", fontsize=8)
    axis.set(xlim=(-0.2, 17.7), ylim=limits, aspect="equal")


# %%
lr = 0.2
new_weights = [copies[0] - lr / 32 * copies[0].grad for copies in device_params]
first_layer = [copies[0] for copies in device_params]
draw_step(images, shards, first_layer, own_gradients, [weight.grad for weight in first_layer], new_weights)
plt.show()

# %% [markdown]
# Read it from left to right. The batch exists once, on the host. Of the shards every device has another; of the
# weights all have the same. From unequal samples and equal weights come unequal gradients: this column is the only
# one in which the devices differ. The black line is the allreduce, their only exchange; after it, all have the same
# gradients. If you can say why the last column is equal, you have understood synchronous data parallelism.
#
# ## One step, whole
#
# Now the same as a function. The update divides by the size of the **whole** batch, not of the shard: the gradients
# are sums over all samples, and the mean is what we want to descend on.


# %%
def sgd(params, lr, batch_size):
    for param in params:
        param[:] -= lr / batch_size * param.grad


def train_batch(images, labels, device_params, devices, lr):
    shards = gp.split_and_load((images, labels), devices)
    with autograd.record():
        losses = gp.parallel_apply(compute_loss, [(x, y, params) for (x, y), params in zip(shards, device_params)])
    gp.parallel_apply(nd.NDArray.backward, losses)
    for params in device_params[len(shards) :]:  # fewer samples than devices: who got none
        for param in params:  # still holds the gradient of the batch before
            param.grad[:] = 0
    for copies in zip(*device_params):
        gp.allreduce([copy.grad for copy in copies])
    for params in device_params:
        sgd(params, lr, len(labels))
    return sum(loss.sum().as_in_context(mx.cpu()) for loss in losses)  # of the whole batch; not waited for


# %% [markdown]
# ## Is it the same as on one device?
#
# Do not believe it, compare. Two sets of equal weights take three steps on the same batches: one on three devices,
# one on a single device that sees whole batches. The last batch has two samples, so one of the three devices goes
# without.

# %%
gp.reseed(1)
start = init_params()
on_three = [get_params(start, device) for device in devices]
on_one = [get_params(start, devices[0])]

for first, last in [(0, 64), (64, 128), (128, 130)]:
    batch = digits.train.images[first:last], digits.train.labels[first:last]
    train_batch(*batch, on_three, devices, lr)
    train_batch(*batch, on_one, devices[:1], lr)

for name, old, three, one in zip(["w1", "b1", "w2", "b2", "w3", "b3", "w4", "b4"], start, on_three[0], on_one[0]):
    moved, apart = (np.abs(one.asnumpy() - other.asnumpy()).max() for other in (old, three))
    print(f"{name}: the steps moved it by up to {moved:.0e}; three devices and one differ by up to {apart:.0e}")

# %% [markdown]
# float32 carries about seven digits, and that is where the difference lies: the same numbers have been added in
# another order. The next notebook looks at this closely.
#
# ## Training
#
# Nothing new from here on. `gp.datasets.batches` shuffles and yields NumPy arrays on the host. The losses of an epoch
# are read at its end, because reading a number is the one thing that makes Python wait for the devices.


# %%
def accuracy(device_params, images, labels):
    right = 0
    for (x, y), params in zip(gp.split_and_load((images, labels), devices), device_params):
        right += (lenet(x, params).argmax(axis=1) == y.astype("float32")).sum().asscalar()
    return right / len(labels)


# %%
batches = gp.datasets.batches(*digits.train, batch_size=64, shuffle=True)
history = []
for epoch in range(10):
    begin = time.time()
    losses = [train_batch(*batch, device_params, devices, lr) for batch in batches]
    loss = sum(losses).asscalar() / len(digits.train.labels)
    history.append((loss, accuracy(device_params, *digits.test)))
    print(f"epoch {epoch + 1:2}: loss {loss:.3f}, test accuracy {history[-1][1]:.1%}, {time.time() - begin:.1f} s")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
epochs = range(1, len(history) + 1)
left.plot(epochs, [loss for loss, _ in history], "o-", color=COLOURS[0])
left.set(title="training loss", xlabel="epoch", ylim=(0, None), xticks=epochs)
right.plot(epochs, [100 * accuracy for _, accuracy in history], "o-", color=COLOURS[1])
right.set(title="test accuracy in %", xlabel="epoch", ylim=(0, 100), xticks=epochs)
right.grid(axis="y", alpha=0.3)
plt.show()

# %% [markdown]
# ## What the numbers mean
#
# **The copies are still equal**, to the last bit, after 230 steps, although no weights were copied. The reason: equal
# weights minus equal sums are equal. `gp.allreduce` adds once and stores the same result everywhere; if each device
# added up for itself, in its own order, rounding would let the copies drift apart.

# %%
for params in device_params[1:]:
    same = all((a.asnumpy() == b.asnumpy()).all() for a, b in zip(device_params[0], params))
    print(f"{device_params[0][0].context} and {params[0].context} hold the same bits: {same}")

# %% [markdown]
# **The accuracy owes nothing to the three devices.** One device with the same batches would have arrived at the same
# weights, up to rounding; that is what we compared above. Data parallelism is a way to be faster and cannot be a way
# to be better.
#
# **Nor is it faster here**, if your machine has two cores: three devices cannot do more than the cores behind them,
# and an array operation called from Python costs some 50 microseconds, which three devices pay three times. The gain
# comes with real devices and larger nets. What the exchange costs is easily counted, since it does not depend on the
# batch:

# %%
num_weights = sum(param.size for param in device_params[0])
batch = 4 * digits.train.images[:64].size
print(f"samples, host to devices, per step:    {batch:>9,} bytes")
print(f"gradients, every device, per step:     {4 * num_weights:>9,} bytes")
print(f"for 256 samples instead of 64:         {4 * batch:>9,} and again {4 * num_weights:,} bytes")

# %% [markdown]
# So larger batches make the exchange cheaper per sample. How large they may become, and what the learning rate has to
# do with it, belongs to the next notebook.
#
# ## Exercises
#
# 1. In `train_batch`, divide by `len(labels) / len(devices)` instead of `len(labels)`. Which learning rate have you
#    really been training with?
# 2. Leave out the lines that zero the gradients of devices without samples. For which batch sizes does it matter?
#    Make the comparison with one device fail.
# 3. Replace `gp.allreduce` by nothing. The accuracy may still look decent. What is being trained, and what does
#    `accuracy` measure then? Compare the copies.
# 4. Replace it by an average of the *weights* every tenth step. That is another algorithm (local SGD) and needs a
#    tenth of the exchanges. What does it cost in accuracy?
# 5. In `allreduce_by_hand` device 0 receives everything. Write a ring instead: cut the array into N pieces, and let
#    every device pass pieces to its right neighbour only. How many bytes does each device send now, for N devices?
# 6. Train on `"cpu:1"`, `"cpu:2"` and `"cpu:5"` from the same seed and plot the differences of the weights over the
#    steps. Do they grow? Why do they not stay at the size of a single rounding?
