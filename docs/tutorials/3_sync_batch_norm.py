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
# # 3. Batch norm needs the whole batch
#
# *From the formula and its gradient to the exchange between devices.*
#
# The second notebook ended with a promise: one step over N devices is one step on the N-fold batch. One kind of layer
# breaks it. Batch norm lets every sample look at the others, through the mean and the variance of the batch; when the
# batch is cut into shards, each device computes them from what *it* has. With 64 images per device the difference is
# small. Segmentation and detection have two.

# %%
import warnings

import matplotlib.pyplot as plt
import numpy as np

import gluon_parallel as gp  # before MXNet: it makes MXNet 1.9.1 run on today's Python
import mxnet as mx
from mxnet import autograd, gluon, nd

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
devices = gp.devices("cpu:8")
rng = np.random.default_rng(0)

# %% [markdown]
# ## How wrong is a small batch?
#
# A channel whose true mean is 0 and whose true variance is 1, seen through shards of different size. Every dot is what
# one device would subtract, or divide by. The spread of the mean shrinks like $1/\sqrt{n}$, slowly; and dividing by an
# estimated deviation adds noise of its own.

# %%
sizes = [2, 4, 8, 16, 32, 64]
figure, axes = plt.subplots(1, 2, figsize=(9, 3), sharex=True)
for size in sizes:
    shards = rng.normal(size=(200, size))
    for axis, values in zip(axes, (shards.mean(axis=1), shards.std(axis=1))):
        axis.plot(size * rng.uniform(0.92, 1.08, 200), values, ".", markersize=2, color="tab:blue", alpha=0.5)
for axis, title, truth in zip(axes, ("mean that is subtracted", "deviation that is divided by"), (0, 1)):
    axis.axhline(truth, color="black", linewidth=0.8)
    axis.set(xscale="log", xticks=sizes, xticklabels=sizes, xlabel="samples per device", title=title)
    axis.minorticks_off()
figure.tight_layout()

# %% [markdown]
# ## What must be exchanged in the forward pass
#
# For one channel, over all $N$ values of the batch,
#
# $$\mu = \frac{1}{N}\sum_i x_i,\qquad \sigma^2 = \frac{1}{N}\sum_i (x_i-\mu)^2,\qquad
# \hat x_i = \frac{x_i-\mu}{\sqrt{\sigma^2+\epsilon}},\qquad y_i = \gamma\,\hat x_i + \beta .$$
#
# A device cannot know $\mu$ without the other shards. The tempting shortcut is to exchange $\sum x$ and $\sum x^2$ and
# to use $\sigma^2 = \overline{x^2} - \mu^2$. In 32 bits that fails as soon as the mean is large: two almost equal
# numbers are subtracted. What works is to exchange three numbers per channel, the count $n_d$, the mean $\mu_d$ and the
# squared deviations from it, $M_d = \sum_{i\in d}(x_i-\mu_d)^2$. They combine exactly, whatever the sizes:
#
# $$N=\sum_d n_d,\qquad \mu=\frac1N\sum_d n_d\,\mu_d,\qquad M=\sum_d \left( M_d + n_d(\mu_d-\mu)^2 \right),\qquad
# \sigma^2=\frac MN .$$


# %%
def moments(x):
    return len(x), x.mean(dtype=np.float64), np.square(x - x.mean(dtype=np.float64)).sum()


def combine(parts):
    count = sum(n for n, _, _ in parts)
    mean = sum(n * m for n, m, _ in parts) / count
    return count, mean, sum(m2 + n * (m - mean) ** 2 for n, m, m2 in parts)


offsets = 10.0 ** np.arange(0, 7)
errors = {"sum of squares": [], "count, mean, deviations": []}
for offset in offsets:
    x = (rng.normal(size=64) + offset).astype(np.float32)
    truth = x.astype(np.float64).var()
    naive = np.square(x).mean() - x.mean() ** 2
    count, _, deviations = combine([moments(x[:48]), moments(x[48:])])  # 48 + 16 samples
    errors["sum of squares"].append(abs(naive - truth) + 1e-17)
    errors["count, mean, deviations"].append(abs(deviations / count - truth) + 1e-17)
figure, axis = plt.subplots(figsize=(6, 3))
for name, values in errors.items():
    axis.loglog(offsets, values, "o-", label=name)
axis.set(xlabel="mean of the channel (its variance is 1)", ylabel="error of the variance")
axis.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## What must be exchanged in the backward pass
#
# Let $g_i = \partial L/\partial y_i$. Every $x_i$ acts on the loss in three ways: directly through $\hat x_i$, through
# $\mu$, and through $\sigma^2$. With $r = 1/\sqrt{\sigma^2+\epsilon}$ and $\hat g_i = \gamma g_i$,
#
# $$\frac{\partial L}{\partial \sigma^2} = -\tfrac12 r^3 \sum_j \hat g_j (x_j-\mu),\qquad
# \frac{\partial L}{\partial \mu} = -r\sum_j \hat g_j ,$$
#
# (the part of $\partial L/\partial\mu$ that goes through $\sigma^2$ vanishes, because $\sum_j(x_j-\mu)=0$), and
# therefore
#
# $$\frac{\partial L}{\partial x_i} = r\Big(\hat g_i - \frac1N\sum_j \hat g_j - \hat x_i\,\frac1N\sum_j \hat g_j\hat
# x_j\Big).$$
#
# The two sums run over the *whole* batch: a device that leaves out the other shards' sums returns a wrong gradient,
# even if its forward pass was right. So there is one exchange in each direction: three vectors forward, two backward.
# For a layer of 64 channels that is about a kilobyte.
#
# The gradients of $\gamma$ and $\beta$ need no exchange. Each device keeps its own share, and the trainer sums them
# like any other gradient.

# %% [markdown]
# ## The exchange between devices
#
# MXNet runs each device's operators when their inputs are ready, so devices reach a layer at different times, perhaps
# in another order than the other devices. So a layer has one meeting, a *rendezvous*, per call and direction. A device
# that arrives leaves its vector there and sleeps; the last one to arrive combines all, sends the result through a
# KVStore if other processes take part, and wakes the others. The layer does this in C. Here it is in Python, without
# other processes, and with two threads in place of devices:

# %%
import threading
from concurrent.futures import ThreadPoolExecutor

all_arrived, brought = threading.Barrier(2, timeout=10), {}


def device(name, shard):
    brought[name] = moments(shard)
    all_arrived.wait()
    return combine([brought[name] for name in sorted(brought)])


x = rng.normal(size=8) + 1e6
with ThreadPoolExecutor(2) as pool:
    results = list(pool.map(device, ["first", "second"], [x[:6], x[6:]]))
for count, mean, deviations in results:
    print(f"count {count}, mean {mean:.6f}, deviations {deviations:.6f}")
print(f"NumPy:   mean {x.mean():.6f}, deviations {np.square(x - x.mean()).sum():.6f}")

# %% [markdown]
# A device may not arrive: it has raised an error, has no samples, or runs another net. A hang is the worst error
# message of all, so waiting has a limit, and the error says which device is missing. Here the layer lives on two
# devices, and the loop reads a result of the first before it calls the second:

# %%
layer = gp.nn.SyncBatchNorm(in_channels=1)
layer.initialize(ctx=gp.devices("cpu:2"))
try:
    with mx.autograd.record():
        layer(mx.nd.ones((4, 1), mx.cpu(0))).wait_to_read()
except gp.errors.DeviceNotLaunched as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# ## The layer
#
# `gp.nn.SyncBatchNorm` is `gluon.nn.BatchNorm` with these two exchanges. Shards of 6 and 2 samples, a mean of 1000: the
# output is that of the whole batch.

# %%
layer = gp.nn.SyncBatchNorm(in_channels=3)
layer.initialize(ctx=devices[:2])
x = (rng.normal(size=(8, 3, 4, 4)) + 1000).astype("float32")
shards = [nd.array(x[:6], ctx=devices[0]), nd.array(x[6:], ctx=devices[1])]
with autograd.record():
    outputs = gp.parallel_apply(layer, shards)
y = np.concatenate([output.asnumpy() for output in outputs])
exact = x.astype("float64")
exact = (exact - exact.mean((0, 2, 3), keepdims=True)) / np.sqrt(exact.var((0, 2, 3), keepdims=True) + 1e-5)
print(f"largest error: {abs(y - exact).max():.1e}")

# %% [markdown]
# ## Does it matter?
#
# Stripes of four directions, 16 images per batch, in a brightness that changes from image to image (and from batch to
# batch). Three runs from the same weights over the same batches: one device with all 16, four devices with 4 each and
# synchronised layers, and eight devices with 2 each and plain batch norm. They compute in float64; the first two also
# in float32.


# %%
def stripes(size):
    labels = rng.integers(4, size=size)
    angle, phase = labels * np.pi / 4, rng.uniform(0, 2 * np.pi, size)
    row, column = np.mgrid[:8, :8]
    waves = np.cos(angle)[:, None, None] * row + np.sin(angle)[:, None, None] * column
    images = np.sin(1.5 * waves + phase[:, None, None]) + rng.normal(size=(size, 1, 1)) * 2
    return nd.array(images[:, None], dtype="float64"), nd.array(labels)


def network(norm):
    net = gluon.nn.HybridSequential()
    for i in range(3):
        net.add(gluon.nn.Conv2D(8, 3, padding=1, use_bias=False, in_channels=8 if i else 1))
        net.add(norm(in_channels=8), gluon.nn.Activation("relu"))
    net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(4, in_units=8))
    return net


def train(norm, devices, dtype="float64"):
    net = gp.nn.convert_for_cpu(network(norm))
    net.cast(dtype)
    net.initialize(ctx=devices)
    for parameter, value in zip(net.collect_params().values(), weights):
        parameter.set_data(value)
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
    step = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, devices=devices)
    return np.array([step(x.astype(dtype), y).asscalar() for x, y in batches])


gp.reseed(0)
warnings.filterwarnings("ignore", category=gp.errors.StatisticsPerDevice)  # gp.DataParallel warns of the plain run
batches = [stripes(16) for _ in range(150)]
start = network(gluon.nn.BatchNorm)
start.initialize(mx.init.Xavier())
weights = [parameter.data().copy() for parameter in start.collect_params().values()]
one = train(gluon.nn.BatchNorm, devices[:1])
synchronised = train(gp.nn.SyncBatchNorm, devices[:4])
plain = train(gluon.nn.BatchNorm, devices)
one_32 = train(gluon.nn.BatchNorm, devices[:1], "float32")
synchronised_32 = train(gp.nn.SyncBatchNorm, devices[:4], "float32")
figure, axes = plt.subplots(1, 2, figsize=(9, 3))
curves = {"1 device x 16": one, "4 devices x 4, synchronised": synchronised, "8 devices x 2, plain": plain}
for (name, curve), style in zip(curves.items(), ("-", "--", "-")):
    axes[0].plot(np.convolve(curve, np.ones(10) / 10, "valid"), style, label=name)
distances = {
    "plain": plain - one,
    "synchronised, float32": synchronised_32 - one_32,
    "synchronised": synchronised - one,
}
for (name, distance), colour in zip(distances.items(), ("tab:green", "tab:red", "tab:orange")):
    axes[1].semilogy(abs(distance), ".", markersize=4, color=colour, label=name)  # without steps where it is 0
axes[0].set(xlabel="step", ylabel="loss (mean of 10 steps)")
axes[1].set(xlabel="step", title="distance of the loss from one device", ylim=(1e-18, 10))
for axis, place in zip(axes, ("upper right", "center right")):
    axis.legend(frameon=False, fontsize=8, loc=place)
figure.tight_layout()
print(f"synchronised, largest distance in float64: {abs(synchronised - one).max():.0e}")

# %% [markdown]
# In float64 the synchronised run is the run on one device, up to the last digits, in all 150 steps. The plain one is
# another experiment, from the first step on.
#
# In float32 both begin equal as well. Then one rounding error moves an input of a ReLU to the other side of zero, where
# the gradient is another one: the distance jumps, and training makes it larger. Neither run is more right than
# the other. Only a comparison in float64 tells such differences from a wrong layer.
#
# ## In your own net
#
# - Nets that take a norm layer: `get_model("fcn_resnet50_ade", norm_layer=gp.nn.SyncBatchNorm, ctx=devices)`
# - Any other net, also a trained one: `gp.nn.convert_sync_batchnorm(net)`, and `gp.nn.revert_sync_batchnorm(net)` back.
#   Parameters stay the same objects; `net.export(...)` writes plain BatchNorm operators in any case.
# - Several processes: `gp.nn.SyncBatchNorm(kvstore="dist_sync")`; every process builds its layers in the same order.
# - A last batch with fewer samples than devices: `gp.DataParallel` leaves the idle devices out by itself. In a loop
#   of your own, say which devices take part:

# %%
net, loss = network(gp.nn.SyncBatchNorm), gluon.loss.SoftmaxCrossEntropyLoss()
net.cast("float64")
net.initialize(mx.init.Xavier(), ctx=devices[:4])
x, y = stripes(3)
shards, labels = (gp.split_and_load(part, devices[:4]) for part in (x, y))
with gp.nn.participants(net, [shard.context for shard in shards]):
    with autograd.record():
        losses = gp.parallel_apply(lambda a, b: loss(net(a), b), list(zip(shards, labels)))
    gp.parallel_apply(autograd.backward, losses)
print([float(loss.mean().asscalar()) for loss in losses])

# %% [markdown]
# ## Exercises
#
# 1. In `combine`, leave out the term $n_d(\mu_d-\mu)^2$. For which shards is the variance still right?
# 2. Write the backward pass in NumPy, and compare with autograd on one device, for the losses `y.sum()`, `(y **
#    2).sum()` and `(y * r).sum()` with a random `r`. Which of them are poor tests of a backward pass, and why?
# 3. After the plain run, compare `running_mean` and `running_var` of a layer on the eight devices, and with those of
#    the synchronised run. Which of them would `net.save_parameters` write?
#
# <details><summary>Answers</summary>
#
# 1. Only if all shards have the same mean. Without the term the variance is too small, in the second picture by 1e-4
#    to 0.05, whatever the mean of the channel is.
# 2. `y.sum()` is constant, since the $\hat x_i$ add up to 0, and `(y ** 2).sum()` almost, since their squares add up
#    to $N$ (but for $\epsilon$). The true gradients are 0 and about 1e-5, so a backward pass that returns zeros
#    passes both tests. A random `r` gives gradients of the size of 1.
# 3. They differ on each device: in our run the means of the first channel lie between -0.05 and 0.05, and the
#    variances, which are of two images each, between 0.20 and 0.23. The synchronised run has 0.002 and 0.29, equal on
#    all devices. `net.save_parameters` writes the mean over the devices, which is right for the mean and too small
#    for the variance.
#
# </details>
