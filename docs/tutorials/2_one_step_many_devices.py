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
# # 2. One step on many devices
#
# *The concise Gluon version, and why it is exact.*
#
# The first notebook split batches and summed gradients by hand; `gp.DataParallel` does that in three lines. In what
# sense, exactly, do N devices do what one would have done? **One step over N devices is one step on the N-fold batch.**
# That has three consequences that are easily got wrong: shards of unequal size, clipping, and the learning rate.

# %%
import matplotlib.pyplot as plt
import numpy as np

import gluon_parallel as gp  # before MXNet: it makes MXNet 1.9.1 run on today's Python
import mxnet as mx
from mxnet import autograd, gluon, nd

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## The whole program
#
# Three things differ from training on one device: the net is initialised on a list of devices, one line builds
# `gp.DataParallel`, and one line calls it. The trainer is Gluon's own and remains the owner of the optimizer.

# %%
devices = gp.devices("cpu:2")
digits = gp.datasets.load("digits")
loss_function = gluon.loss.SoftmaxCrossEntropyLoss()

gp.reseed(0)
net = gp.nn.convert_for_cpu(gp.models.LeNet())  # faster on CPUs, with the same values
net.initialize(mx.init.Xavier(), ctx=devices)  # a copy on every device
net.hybridize()
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
step = gp.DataParallel(net, loss_function, trainer)

# %%
batches = gp.datasets.batches(*digits.train, batch_size=64, shuffle=True)
test = gp.datasets.batches(*digits.test, batch_size=256)
for epoch in range(6):
    total = sum(step(images, labels) * len(labels) for images, labels in batches)
    [(_, accuracy)] = gp.evaluate(net, test, "acc", devices)
    print(f"epoch {epoch + 1}: loss {total.asscalar() / len(digits.train.labels):.3f}, test accuracy {accuracy:.1%}")

# %% [markdown]
# `step` cuts the batch, runs net and loss on every device, goes backward, sums the gradients and lets the trainer
# update every copy. It returns the mean loss as an array that may not be computed yet; only `asscalar` waits for it.
#
# ## Why it is one step on the whole batch
#
# Let the batch have $N$ samples, and let $\ell_i(w)$ be the loss of sample $i$ with weights $w$. Training descends on
# the mean,
#
# $$L(w) = \frac{1}{N}\sum_{i=1}^{N}\ell_i(w).$$
#
# Now deal the samples out to devices. Device $d$ gets the set $S_d$; every sample goes to exactly one device. A sum
# does not care how its terms are grouped, and a gradient is linear, so
#
# $$\nabla L(w) = \frac{1}{N}\sum_{d}\ \underbrace{\sum_{i\in S_d}\nabla\ell_i(w)}_{g_d}.$$
#
# Device $d$ can compute $g_d$ alone, because it has the samples of $S_d$ and the weights $w$. Allreduce is the outer
# sum. Nothing was assumed about the sizes of the $S_d$; one may even be empty.
#
# What follows in the step (momentum, Adam, weight decay, clipping) is a function of the weights, this gradient and the
# optimizer's state. All are the same on every device, so the copies stay equal for ever, and equal to those of a single
# device with the whole batch.
#
# ## Checking it
#
# This function trains a fresh net, always from the same weights, and returns all its weights as one vector. We shall
# compare such vectors for the rest of the notebook.

# %%
gp.reseed(1)
first_net = gp.models.LeNet()
first_net.initialize(mx.init.Xavier())
start = [parameter.data().asnumpy() for parameter in first_net.collect_params().values()]
start_vector = np.concatenate([weight.ravel() for weight in start])


def train(devices, batches, dtype="float32", **options):
    """The weights after one step per batch, (129068,); options go to gp.DataParallel."""
    net = gp.models.LeNet()
    net.cast(dtype)
    net.initialize(ctx=devices)
    for parameter, weight in zip(net.collect_params().values(), start):
        parameter.set_data(nd.array(weight, dtype=dtype))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    step = gp.DataParallel(net, loss_function, trainer, **options)
    for images, labels in batches:
        step(nd.array(images, dtype=dtype), nd.array(labels, dtype=dtype))
    return np.concatenate([parameter.data(devices[0]).asnumpy().ravel() for parameter in net.collect_params().values()])


def compare(what, one, other):
    """How far two results lie apart, measured by how far training has moved."""
    apart = np.linalg.norm(one - other) / np.linalg.norm(one - start_vector)
    print(f"{what:45}{apart:.1e}")


# %% [markdown]
# One step with 64 samples: on one device, and on three (22, 21 and 21 samples).

# %%
three = gp.devices("cpu:3")
images, labels = digits.train.images[:64], digits.train.labels[:64]
whole = train(three[:1], [(images, labels)])
compare("three devices against one:", whole, train(three, [(images, labels)]))

# %% [markdown]
# Not zero. Is that an error in the sixth digit, or rounding? Two experiments decide: one device with the same samples
# in reverse order, where only the order of the additions differs, and float64, in which rounding must shrink by nine
# orders of magnitude ($2^{-53}$ against $2^{-24}$). A mistake would not shrink at all.

# %%
compare("one device, samples reversed:", whole, train(three[:1], [(images[::-1], labels[::-1])]))
whole64 = train(three[:1], [(images, labels)], dtype="float64")
compare("three devices against one, float64:", whole64, train(three, [(images, labels)], dtype="float64"))

# %% [markdown]
# It is rounding. Three devices differ from one as one device differs from itself with the samples in another order.
# So "the same result" means "the same up to rounding", on a single device too.
#
# ## The mean of means is not the mean
#
# It is tempting to let every device take the mean over its own samples and to average those. TensorFlow's early
# examples did: each device is a *tower*. `gp.average_gradients` is this operation. With $n_d$ samples on device $d$ of
# $D$ devices it yields
#
# $$\frac{1}{D}\sum_d \frac{g_d}{n_d}, \qquad\text{which equals}\qquad \frac{1}{N}\sum_d g_d
# \qquad\text{only if every } n_d = \frac{N}{D}.$$
#
# With three samples on one device and two on each of the others, a sample in the small shards counts one and a half
# times as much as one in the large shard. Numbers small enough to check in the head:

# %%
losses = np.array([6.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
shards = np.split(losses, [3, 5])
print("mean:         ", losses.mean())
print("mean of means:", np.mean([shard.mean() for shard in shards]))

# %% [markdown]
# Now with true gradients. Every tower takes its mean loss; `gp.average_gradients` averages; the truth is one device
# with the whole batch.


# %%
def towers(net, images, labels, devices, divisor=None):
    """Each device's gradients of the sum of its losses, divided by its number of samples or by `divisor`."""
    shards = gp.split_and_load((images, labels), devices)
    with autograd.record():
        losses = gp.parallel_apply(lambda x, y: loss_function(net(x), y).sum() / (divisor or len(y)), shards)
    gp.parallel_apply(autograd.backward, losses)
    parameters = net.collect_params().values()
    return [[parameter.grad(x.context).copy() for parameter in parameters] for x, _ in shards]


def as_vector(gradients):
    return np.concatenate([gradient.asnumpy().ravel() for gradient in gradients])


# %%
gp.reseed(2)
net = gp.models.LeNet()
net.initialize(mx.init.Xavier(), ctx=three)
net.hybridize()

sizes = list(range(3, 25))
of_means, of_sums = [], []
for size in sizes:
    batch = digits.train.images[:size], digits.train.labels[:size]
    truth = as_vector(towers(net, *batch, three[:1])[0])
    means = gp.average_gradients(towers(net, *batch, three))
    sums = gp.average_gradients(towers(net, *batch, three, divisor=size / 3))
    for errors, gradients in [(of_means, means), (of_sums, sums)]:
        errors.append(np.linalg.norm(as_vector(gradients[0]) - truth) / np.linalg.norm(truth))

# %%
figure, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
axis.semilogy(sizes, of_means, "o", color="#c8553d", markersize=9, label="mean of the towers' means")
axis.semilogy(sizes, of_sums, "s", color="#2a6f97", markersize=5, label="sum over all samples, divided by $N$")
axis.set(xlabel="samples in the batch, on three devices", ylabel="relative error of the gradient", xticks=sizes)
axis.set_ylim(1e-8, 10)
axis.legend(loc="center right", frameon=False)
plt.show()

# %% [markdown]
# Where the batch divides by three, both are exact. Everywhere else the mean of means is off by five to fifty percent,
# and no test with even shards would notice. In practice this hits the last batch of an epoch. `gp.DataParallel` uses
# the second rule: no sample is dropped, and all count alike. (The blue squares come from `gp.average_gradients` too;
# there every tower has divided by $N/3$, whatever its own size.)
#
# ## More batch than fits: accumulation
#
# The derivation never said that the shards are computed at the same *time*. One device can also work through them one
# after the other and add. `accumulate=4` updates after every fourth call, with the mean over all the samples seen
# since.

# %%
quarters = [(images[begin : begin + 16], labels[begin : begin + 16]) for begin in range(0, 64, 16)]
compare("4 x 16 samples on 3 devices, 64 on one:", whole, train(three, quarters, accumulate=4))
compare("without accumulation, for comparison:", whole, train(three, quarters))

# %% [markdown]
# The second number is no rounding: four steps lead elsewhere, and about four times as far, as one.
#
# ## Clipping comes after the sum
#
# Clipping scales a gradient down when its norm exceeds a limit. The norm meant is that of $\nabla L$, so it can only
# be applied when the sum is complete. The shards' own gradients are longer than their mean, and are clipped harder.


# %%
def clipped(gradient, norm):
    return gradient * min(1, norm / np.linalg.norm(gradient))


limit = 0.2
norm = np.linalg.norm(whole - start_vector) / 0.1
print(f"norm of the mean gradient: {norm:.2f}; limit: {limit}")

one = train(three[:1], [(images, labels)], clip_global_norm=limit)
compare("clipped after the sum, 3 devices and 1:", one, train(three, [(images, labels)], clip_global_norm=limit))

for parameter, weight in zip(net.collect_params().values(), start):
    parameter.set_data(nd.array(weight))
shares = [clipped(as_vector(tower), limit) for tower in towers(net, images, labels, three)]
compare("clipped before the sum, 3 devices and 1:", one, start_vector - 0.1 * np.mean(shares, axis=0))

# %% [markdown]
# ## When it is *not* one step on the whole batch
#
# The derivation used one property of the loss: sample $i$'s part depends on sample $i$ and the weights, on nothing
# else. Three customary layers and losses break it.
#
# - **Batch normalisation** uses the mean and variance of the samples that it sees, which are those of its shard. The
#   third notebook is about the layer that sees them all, `SyncBatchNorm`.
# - **Dropout** draws other masks on every device. That is the same in distribution, but not in digits.
# - **Losses between samples** (contrastive ones, for instance) miss the pairs that lie on different devices, unless
#   `gp.DataParallel(..., loss_over="batch")` gathers the outputs for them.
#
# ## The learning rate
#
# N devices are usually given N times the batch, so that each stays as busy as before. Then an epoch has only $1/N$ of
# the steps. To get equally far, each must be larger: $N$ small steps with rate $\eta$ move by
# $-\eta\sum_{t=1}^{N}\nabla L_t(w_t)$, one large step with rate $\eta'$ by $-\eta'\,\frac{1}{N}\sum_t\nabla L_t(w)$.
# As long as $w$ hardly changes in between, they agree for $\eta' = N\eta$. This is the *linear scaling rule*.


# %%
def loss_curve(batch_size, lr, epochs=5):
    gp.reseed(3)
    net = gp.nn.convert_for_cpu(gp.models.LeNet())
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": lr})
    step = gp.DataParallel(net, loss_function, trainer)
    loader = gp.datasets.batches(*digits.train, batch_size, shuffle=True)
    losses = []
    for _ in range(epochs):
        total = sum(step(images, labels) * len(labels) for images, labels in loader)
        losses.append(total.asscalar() / len(digits.train.labels))
    return losses


figure, axis = plt.subplots(figsize=(9, 3.2), layout="constrained")
for batch_size, lr, style in [(32, 0.02, "o-"), (128, 0.02, "s:"), (128, 0.08, "s-")]:
    losses = loss_curve(batch_size, lr)
    colour = "#2a6f97" if batch_size == 32 else "#c8553d"
    axis.plot(range(1, 6), losses, style, color=colour, label=f"batch {batch_size}, learning rate {lr}")
axis.set(xlabel="epoch", ylabel="training loss", xticks=range(1, 6), ylim=(0, None))
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# With the old learning rate the fourfold batch, which takes a quarter of the steps, hardly gets off the ground. With
# the fourfold rate it follows the small batch and falls a little behind. At the start of training $w$ changes fast,
# and with a large $N\eta$ the rule fails there, which is why one warms up, raising the rate over the first epochs. And
# beyond some batch size (here a few hundred: there are 1,438 images) no rate makes up for the missing steps.
#
# `gp.DataParallel` does not touch the learning rate. Its gradient is a mean, so that the rate means the same for
# every batch size and every number of devices; to scale it is a decision, and it is yours.
#
# ## Exercises
#
# 1. Derive what `gp.DataParallel` must do when the loss returns the mean over its shard instead of one value per
#    sample, and when it returns the sum. Then pass `lambda output, label: loss_function(output, label).mean()` to
#    `gp.DataParallel` in `train`, with `reduction="mean"`, and compare. What happens without the word?
# 2. Replace SGD by Adam in `train`, with a rate of 0.001. Is a single weight further from that of one device? Think
#    of what Adam does to a gradient that is almost zero.
# 3. Train for 50 steps instead of one, in float32 and in float64. How far are three devices and one apart? What does
#    that say about comparing two *trained* nets?
#
# <details><summary>Answers</summary>
#
# 1. A device's mean is $\frac{1}{n_d}$ times the sum that the formula wants, so its backward pass starts with $n_d$
#    in the place of 1; for a sum with 1. With the word, the difference is that of rounding, 1e-6. Without it the step
#    is refused (`BatchMismatch`): a single value might be either.
# 2. Yes: 1.6e-7 instead of 1.5e-8, although the rate is a hundredth. Adam divides each gradient by its own size, so
#    one that is rounding error alone makes a step as long as any other, in an arbitrary direction. In float64 it is
#    6e-16.
# 3. In our run, after 10 steps still 1e-6 and 1e-15 of the way that the weights have gone; after 50 steps 0.13 in
#    float32 and 1.5e-15 in float64. At a rate of 0.1 rounding decides on which side of a ReLU or a maximum some
#    inputs fall, and training makes such differences larger. So compare gradients, a few steps, or float64, not
#    trained nets in float32.
#
# </details>
