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
# # 7. Pipeline parallelism
#
# *A net in stages, the bubble, and what recomputation saves.*
#
# In the notebooks before, every device held the whole net. A net that does not fit into the memory of one device needs
# another way: it is cut into consecutive **stages**, each on a device of its own. Activations go from device to device
# in the forward pass, and gradients come back in the backward pass. If the whole batch went through at once, one device
# would work and the others would wait. So the batch is cut into **micro-batches**: while the second stage works on the
# first micro-batch, the first stage works on the second one. This is pipeline parallelism, as in GPipe.

# %%
import io

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Image, display

import gluon_parallel as gp  # before MXNet: it makes MXNet 1.9.1 run on today's Python
import mxnet as mx
from mxnet import autograd, gluon, nd

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
devices = gp.devices("cpu:2")
loss_function = gluon.loss.SoftmaxCrossEntropyLoss()
digits = gp.datasets.load("digits")
images, labels = (nd.array(array[:64]) for array in digits.train)

# %% [markdown]
# ## A net and its cut
#
# Eight convolutions and a classifier. `gp.pipeline.partition` measures how long each layer's forward and backward pass
# takes on one micro-batch, and cuts where the slowest stage is as fast as possible. The slowest stage sets the pace of
# all. Without a micro-batch it makes the stages equal in bytes of parameters, which is right where memory is what
# lacks: here it puts all convolutions on one device.


# %%
def make_net(dropout=0.2):
    net = gluon.nn.HybridSequential()
    with net.name_scope():
        for _ in range(8):
            net.add(gluon.nn.Conv2D(16, kernel_size=3, padding=1, activation="relu"))
        net.add(gluon.nn.MaxPool2D(pool_size=4, strides=4), gluon.nn.Dense(512, activation="relu"))
        net.add(gluon.nn.Dropout(dropout), gluon.nn.Dense(10))
    gp.reseed(0)
    net.initialize(mx.init.Xavier("gaussian", "in", 2))
    net.hybridize()
    net(images[:1])  # from here on the shapes of all parameters are known
    return net


net = make_net()
stages = gp.pipeline.partition(net, 2, images[:16])
print(f"by bytes of parameters:\n{gp.pipeline.partition(net, 2)}\nby measured time:\n{stages}")

# %% [markdown]
# ## Training
#
# `gp.Pipeline` moves each stage to its device. One `gluon.Trainer` has all parameters, and `pipe.step` trains on one
# batch: it cuts the batch, launches all passes, and updates once, after the last micro-batch.

# %%
pipe = gp.Pipeline(stages, devices, num_micro_batches=4)
trainer = gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0.005, "momentum": 0.9})
batches = gp.datasets.batches(*digits.train, batch_size=64, shuffle=True, last_batch="discard")
test = gp.datasets.batches(*digits.test, batch_size=256)
for epoch in range(5):
    losses = [pipe.step(loss_function, trainer, x, y) for x, y in batches]
    [(_, accuracy)] = gp.evaluate(pipe, test, "acc", devices[:1])
    print(f"epoch {epoch + 1}: loss {np.mean([loss.asscalar() for loss in losses]):.3f}, accuracy {accuracy:.1%}")
print("first layer on", net[0].weight.list_ctx(), "last layer on", net[-1].weight.list_ctx())

# %% [markdown]
# ## The bubble
#
# At the beginning of a step the last stage has nothing to work on yet, and at its end the first stage has nothing left.
# With $S$ equal stages and $m$ micro-batches a step takes $m + S - 1$ times as long as one micro-batch takes in one
# stage, and each device works for $m$ of these. The rest is the **bubble**:
#
# $$\frac{S - 1}{m + S - 1}.$$
#
# More micro-batches make it smaller. But a device computes small batches less efficiently, and every pass has a fixed
# cost of launching its operators. So it has to be measured: `pipe.profile` trains on one batch like `pipe.step`, and
# notes when each pass ran. More is idle than the formula says where other programs use the cores.


# %%
def best_profile(num_micro_batches, order="1f1b", recompute=False):
    net = make_net()
    halves = [net[:cut], net[cut:]]
    for half in halves:
        half.hybridize()
    pipe = gp.Pipeline(halves, devices, num_micro_batches, order, recompute)
    trainer = gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0.01})
    for _ in range(3):  # the first steps take longer
        pipe.step(loss_function, trainer, images, labels)
    return min((pipe.profile(loss_function, trainer, images, labels) for _ in range(10)), key=lambda one: one.seconds)


cut = len(stages[0])
counts = (1, 2, 4, 8, 16)
profiles = {m: best_profile(m) for m in counts}
figure, axis = plt.subplots(figsize=(6, 3))
axis.plot(range(5), [1 / (m + 1) for m in counts], "--", color="black", label="(S - 1) / (m + S - 1)")
axis.plot(range(5), [profiles[m].idle for m in counts], "o-", label="measured")
axis.set(xlabel="micro-batches m", ylabel="idle share of a step", ylim=0, xticks=range(5), xticklabels=counts)
axis.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## The schedule
#
# A profile says the times and the memory of each stage, predicted and measured, and predicts other numbers of
# micro-batches.

# %%
print(profiles[4])

# %% [markdown]
# `profile.draw(path)` makes the picture: above measured, below predicted from the median durations, with the number of
# the micro-batch in each bar, and at the bottom each stage's memory. In the order **1f1b**, forward and backward passes
# alternate after the first few forward passes. In **gpipe** all forward passes come first. Both have the same bubble.

# %%
for profile in (profiles[4], best_profile(4, order="gpipe")):
    picture = io.BytesIO()
    profile.draw(picture)
    display(Image(picture.getvalue(), width=800))

# %% [markdown]
# ## Exact
#
# Each micro-batch contributes to the sum of the gradients with as many samples as it has, and the update comes after
# all. So a step is one of the unsplit net with the whole batch, whatever the number of micro-batches. Here is the
# largest difference of any gradient, relative to the largest gradient of that parameter, for numbers that divide 64 and
# one that does not. What remains are rounding errors of float32. (Without dropout, since each micro-batch draws its own
# random numbers.)


# %%
def gradients(net):
    return [parameter.grad(parameter.list_ctx()[0]).asnumpy() for parameter in net.collect_params().values()]


one = make_net(dropout=0)
with autograd.record():
    loss = loss_function(one(images), labels)
loss.backward()
wanted = gradients(one)
for m in (1, 4, 7, 16):
    pipe = gp.Pipeline(make_net(dropout=0), devices, m)
    pipe.step(loss_function, gluon.Trainer(pipe.collect_params(), "sgd", {"learning_rate": 0.01}), images, labels)
    found = gradients(pipe.net)
    print(f"{m:2} micro-batches: {max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, wanted)):.1e}")

# %% [markdown]
# **Batch norm** is an exception: it takes the statistics of a micro-batch, and a warning says so. With the third
# notebook's remedy, `gp.nn.convert_sync_batchnorm(net)`, a step is exact again. But the statistics of the whole batch
# are known only when all micro-batches have arrived, so a stage with such a layer runs them in one pass, and recomputes
# nothing. A layer with `use_global_stats=True` needs no statistics of the batch, and does not count.
#
# ## Recomputation
#
# For the backward pass a stage keeps the activations of each micro-batch that is on its way: with `gpipe` of all $m$,
# with `1f1b` in stage $s$ (counted from 0) of $S - s$. With `recompute=True` it keeps only its *inputs*, and computes
# the activations again before the backward pass, with the same random numbers for dropout. That is one forward pass
# more, about a third of the work, for less memory. The memory is predicted from the shapes, and measured by MXNet's
# profiler, which also sees what operators need for a moment.

# %%
print("order  recompute   ms per step   MB, predicted: stage 0   stage 1   measured: stage 0   stage 1")
for order in ("gpipe", "1f1b"):
    for recompute in (False, True):
        profile = best_profile(8, order, recompute)
        memory = [how(stage) / 1e6 for how in (profile.memory, profile.measured_memory) for stage in (0, 1)]
        print(f"{order:5}  {recompute!s:9}  {profile.seconds * 1e3:12.0f}", end="")
        print(f"  {memory[0]:22.1f}  {memory[1]:8.1f}  {memory[2]:18.1f}  {memory[3]:8.1f}")

# %% [markdown]
# ## In your own net
#
# - Nets that are one `Sequential` are cut automatically. Others are cut by hand: `gp.Pipeline([first, second], ...)`
#   takes any blocks of which each is called with what the one before it returns. A stage may return a tuple, so skip
#   connections over stages are passed along.
# - Four devices can be four stages, or two replicas of two: `gp.Pipeline(net, [[d[0], d[1]], [d[2], d[3]]], 4)`. Every
#   replica trains on its share of the batch, and the gradients are summed, as the second notebook does it; so they are
#   over processes, with the stores `mpi` and `dist_sync`.
# - `gp.Pipeline` takes `accumulate`, `clip_global_norm` and losses of parts as `gp.DataParallel` does, and
#   `gp.set_precision("bfloat16", devices)` works with it; float16 needs GPUs, for MXNet has no float16 matrix product
#   on CPUs.
# - `pipe.net.save_parameters(file)` writes what the unsplit net loads, and the other way round.
#   `scripts/train_pipeline.py` is a complete training script, with checkpoints that can be resumed.
# - Where the whole net fits into one device's memory, take `gp.DataParallel`: it has no bubble and needs no cut.

# %% [markdown]
# ## Exercises
#
# 1. In `best_profile`, take the cut by bytes, `len(gp.pipeline.partition(net, 2)[0])`. Which device waits now, and
#    how far is the idle share from the formula? What does the formula assume?
# 2. Derive the formula of the bubble from the picture of **gpipe**. Why is it the same for **1f1b**?
# 3. Compare the gradients with dropout, `make_net(dropout=0.2)`. Is the pipeline wrong?
#
# <details><summary>Answers</summary>
#
# 1. The second one: all convolutions are on the first device, whose passes take 4 to 7 times as long. With 4
#    micro-batches 43 % was idle in our run, where the formula says 20 %: it assumes stages that take equally long.
# 2. The first stage begins its $m$ forward passes at once, the last one $S - 1$ passes later; backward it is the
#    other way round. So a step takes $m + S - 1$ forward and as many backward passes, and each device works for $m$
#    of each. **1f1b** changes the order of passes in between, not how many a device has to make, nor how long the
#    first micro-batch takes to the end.
# 3. No. The gradients differ by 0.42 of the largest one, since each micro-batch draws masks of its own. So do two
#    passes of one device with other masks: by 0.57. Without dropout the difference is rounding.
#
# </details>
