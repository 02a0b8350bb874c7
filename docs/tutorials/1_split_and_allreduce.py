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
# Two parts of that need code beyond ordinary training: **split** cuts each batch, and **allreduce** adds up the
# gradients. We build a LeNet from plain arrays. The next notebook does the same with Gluon, in a tenth of the lines.

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
# No GPU is needed: MXNet has as many CPU devices as you name, which compute at the same time as far as the cores reach.
# For GPUs write `"gpu:3"` here. Three is a good number for learning: few batches divide by it.

# %%
devices = gp.devices("cpu:3")
print("running on:", devices)

# %% [markdown]
# ## The data
#
# 1,797 handwritten digits of scikit-learn, as NumPy arrays in the host's memory.

# %%
digits = gp.datasets.load("digits")
print("to train with:", digits.train.images.shape, " to test with:", digits.test.images.shape)
figure, axes = plt.subplots(1, 12, figsize=(9, 1.1))
for axis, image, label in zip(axes, *digits.train):
    axis.imshow(image[0], cmap="gray_r")
    axis.set_title(label)
    axis.axis("off")
plt.show()

# %% [markdown]
# ## The net
#
# A LeNet is eight arrays: four weights, four biases, drawn on the host.


# %%
def init_params(scale=0.1):
    shapes = [(20, 1, 3, 3), (20,), (50, 20, 5, 5), (50,), (800, 128), (128,), (128, 10), (10,)]
    return [nd.random.normal(scale=scale, shape=shape) if len(shape) > 1 else nd.zeros(shape) for shape in shapes]


gp.reseed(0)
params = init_params()
print(f"{len(params)} arrays, {sum(param.size for param in params):,} numbers")

# %% [markdown]
# It is a function of images and parameters, and mentions no device: MXNet runs an operation where its inputs are.


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
# `attach_grad` reserves memory for a gradient. From now on there are three nets, which have to stay equal.


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
# The batch is cut along its first axis, and each shard goes straight to its device. 32 does not divide by 3; then some
# shards are larger by one, since dropping samples or counting some twice would be wrong.

# %%
images, labels = digits.train.images[:32], digits.train.labels[:32]
shards = gp.split_and_load((images, labels), devices)
for x, y in shards:
    print(x.context, x.shape, y.shape)

# %% [markdown]
# ## Every device on its own
#
# `gp.parallel_apply` calls a function once per shard, from the thread of that shard's device. MXNet's operators only
# *queue* work and return: after the last call all three devices compute at the same time, and Python is free.
#
# `loss.backward()` of a vector differentiates the **sum** of its elements, not the mean. So each device holds a sum
# over its own samples, and these add up to the sum of the whole, whatever the sizes of the parts.


# %%
def compute_loss(images, labels, params):
    return cross_entropy(lenet(images, params), labels)


with autograd.record():
    losses = gp.parallel_apply(compute_loss, [(x, y, params) for (x, y), params in zip(shards, device_params)])
gp.parallel_apply(nd.NDArray.backward, losses)

for copies in device_params:
    print(f"gradient of the last bias on {copies[-1].context}:", copies[-1].grad.asnumpy()[:4].round(2))

# %% [markdown]
# ## Allreduce
#
# Three devices, three gradients. Every device needs the sum. Plainly: one collects them and copies the sum to all.


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
# `gp.allreduce` does the same in one pass over the memory. Like every MXNet operation it returns at once: the engine
# adds a gradient as soon as all its copies are complete, while earlier layers are still being differentiated.

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
# The whole step with the numbers of the cells above, one row per device. The coloured squares are the first layer's
# twenty 3 x 3 kernels: red is positive, blue is negative. (The next cell only draws.)


# %%
def mosaic(pictures, columns, gap=0):
    """Pictures of (N, height, width) as one, in rows of so many; what is left free is white."""
    pictures = np.pad(pictures, [(0, -len(pictures) % columns), (0, gap), (0, gap)], constant_values=np.nan)
    count, height, width = pictures.shape
    rows = pictures.reshape(count // columns, columns, height, width)
    return rows.transpose(0, 2, 1, 3).reshape(-1, columns * width)[: -gap or None, : -gap or None]


def draw_step(shards, *columns):
    """One row per device: its shard, and the first layer's weights and gradients on the way through one step."""
    titles = ["split: shards\nall different", "weights\nequal", "backward: gradients\nall different"]
    titles += ["allreduce: sums\nequal", "SGD: new weights\nequal"]
    figure, axes = plt.subplots(len(shards), 5, figsize=(9, 1.4 * len(shards) + 0.4), layout="constrained")
    for row, (shard, _) in zip(axes, shards):
        row[0].imshow(mosaic(shard.asnumpy()[:, 0], 4), cmap="gray_r")
        row[0].set_ylabel(shard.context)
    for column, arrays in enumerate(columns, start=1):
        limit = max(np.abs(array.asnumpy()).max() for array in arrays)
        for axis, array in zip(axes[:, column], arrays):
            axis.imshow(mosaic(array.asnumpy()[:, 0], 5, gap=1), cmap="RdBu_r", vmin=-limit, vmax=limit)
    for axis, title in zip(axes[0], titles):
        axis.set_title(title, fontsize=10)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[], frame_on=False)


# %%
lr = 0.2
new_weights = [copies[0] - lr / 32 * copies[0].grad for copies in device_params]
first_layer = [copies[0] for copies in device_params]
draw_step(shards, first_layer, own_gradients, [weight.grad for weight in first_layer], new_weights)
plt.show()

# %% [markdown]
# Read it from left to right. From unequal samples and equal weights come unequal gradients; the allreduce is the only
# exchange, and after it all have the same. If you can say why the last column is equal, you have understood synchronous
# data parallelism.
#
# ## One step, whole
#
# The update divides by the size of the **whole** batch, not of the shard: the gradients are sums over all samples.


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
# Two sets of equal weights take three steps on the same batches: one on three devices, one on a single device that sees
# whole batches. The last batch has two samples, so one of the three devices goes without.

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
# float32 carries about seven digits, and the same numbers have been added in another order.
#
# ## Training
#
# The losses of an epoch are read at its end, because reading a number makes Python wait for the devices.


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
# **The accuracy owes nothing to the three devices.** One device would have arrived at the same weights, up to rounding.
# Data parallelism is a way to be faster and cannot be a way to be better.
#
# **Nor is it faster here**, if your machine has two cores: three devices cannot do more than the cores behind them.
# The gain comes with real devices and larger nets. The exchange does not depend on the batch: half a megabyte of
# gradients per device and step, for 64 samples as for 256. How large a batch may become belongs to the next notebook.
#
# ## Exercises
#
# 1. In `train_batch`, divide by `len(labels) / len(devices)` instead of `len(labels)`. Which learning rate have you
#    really been training with?
# 2. Leave out the lines that zero the gradients of devices without samples. For which batch sizes does it matter?
#    Make the comparison with one device fail.
# 3. Leave `gp.allreduce` out. The accuracy may still look decent. What is being trained, and what does `accuracy`
#    measure then? Compare the copies.
# 4. In `allreduce_by_hand` device 0 receives everything. In a ring, the array is cut into N pieces, and every device
#    passes pieces to its right neighbour only. How many bytes does each device send, for N devices?
#
# <details><summary>Answers</summary>
#
# 1. With three times as much, 0.6: the same sum is divided by a third of the number.
# 2. For batches of fewer samples than devices, here of one or two. The last batch of the comparison has two, so the
#    third device still holds the sum of the batch before, and adds it again: the weights differ by up to 1, not by
#    1e-7.
# 3. Three nets, each on a third of every batch and with a third of the learning rate, since its sum over a third is
#    divided by the whole batch. They lie 0.17 apart, where the largest weight is 0.5. `accuracy` lets each classify a
#    third of the test images: 92 % in our run.
# 4. In the first round, N - 1 turns, pieces are added up on their way; in the second one, as many turns, the sums are
#    handed on. In each turn a device sends one piece, a N-th of the array: $2 (N - 1) / N$ times its bytes, less than
#    two arrays, however many devices there are.
#
# </details>
