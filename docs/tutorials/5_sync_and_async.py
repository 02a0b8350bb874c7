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
# # 5. Synchronous, asynchronous, and between
#
# *Stragglers, stale gradients, and a setting that chooses between them.*
#
# In the notebooks before, all devices finished a step before anybody began the next. That makes N devices one device
# with an N-fold batch, exactly. It also makes them as slow as the slowest of them.
#
# The other way is not to wait: each device takes the newest weights and sends its gradient to a store, which updates
# the weights at once. But meanwhile the gradients of others have changed the weights: its own belongs to weights that
# are no longer there. It is **stale**. This notebook measures both prices on a virtual clock, where each run comes
# out the same every time, and at the end trains with real threads.

# %%
import itertools
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import gluon_parallel as gp  # before MXNet: it makes MXNet 1.9.1 run on today's Python
import mxnet as mx
from mxnet import gluon

asynchronous = gp.asynchronous
sys.path.append(str(Path(gp.__file__).parents[1] / "scripts" / "studies"))  # they are in the checkout
import simulator

plt.rcParams["figure.constrained_layout.use"] = True
plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})


COLOURS = {"sync": "#1f2933", "backup": "#7b8794", "ssp": "#2a6f97", "local": "#588157", "elastic": "#b8860b",
           "async": "#c8102e", "dc": "#e07a5f"}  # fmt: skip


def colour(mode):
    return COLOURS[mode.partition(":")[0]]


# %% [markdown]
# ## A task
#
# Handwritten digits at half their size, and a net with one hidden layer in plain NumPy. All its weights lie in one flat
# array; so do its gradients. That is how the store sees every net. `net.gradient(weights, batch)` is all that a worker
# ever computes.

# %%
digits = gp.datasets.load("digits")
x, test_x = (part.images[:, 0, ::2, ::2].reshape(-1, 196) for part in (digits.train, digits.test))
y, test_y = digits.train.labels, digits.test.labels
net = simulator.FlatNet(num_inputs=196, num_hidden=32, num_classes=10)
BATCH = 16


def accuracy(weights):
    return net.accuracy(weights, test_x, test_y)


def batches(epochs, seed=0):
    loader = gp.datasets.batches(x, y, BATCH, shuffle=True, seed=seed, last_batch="discard")
    for _ in range(epochs):
        yield from loader


print("to train with:", x.shape, " weights:", net.initial(0).size)

# %% [markdown]
# ## The store, by hand
#
# A store keeps the newest weights. `begin` gives every worker a batch; `take` hands a worker what it was granted;
# `push` receives its gradient. Here are two workers under `async`. Watch the version numbers.

# %%
update = asynchronous.rules.optimizer("sgd", {"momentum": 0.8})
store = asynchronous.create_store("async", net.initial(0), num_workers=2, update=update, lr=0.05)
store.begin(batches(1))

quick, slow = store.take(0), store.take(1)
print("both begin at version", quick.version, "and", slow.version)
for _ in range(3):
    pushed = store.push(0, *net.gradient(quick.weights, quick.batch))
    print(f"worker 0 pushes, staleness {pushed.staleness}; the store is at version {store.version}")
    quick = store.take(0)
pushed = store.push(1, *net.gradient(slow.weights, slow.batch))
print(f"worker 1 pushes, staleness {pushed.staleness}: three updates happened since it took its weights")

# %% [markdown]
# Every push is counted like this, always. **Staleness is a measurement here, not a theory.**
#
# One remark on the learning rate. It is that of a *round*, in which every worker pushes once; `async` moves the weights
# by its share of it at each push. So the mode changes how long we wait, and not how far we go.
#
# ## What waiting looks like
#
# The simulator of `scripts/studies` drives this same store, but its workers are on a virtual clock: a step takes as
# long as we say. Four workers, the first of them four times slower than the others:


# %%
def pool(count, slow=1.0):
    """Workers whose steps take about a second, unevenly; the first takes `slow` times as long."""
    return [simulator.Worker(simulator.uneven(slow if i == 0 else 1.0, spread=0.3)) for i in range(count)]


def run(mode, workers, epochs=8, seed=0, lr=0.15 / 8, observe=None):
    store = asynchronous.create_store(mode, net.initial(seed), len(workers), update, lr * len(workers))
    trace = simulator.simulate(store, net.gradient, workers, batches(epochs, seed), seed, observe=observe)
    return store, trace


figure, axis = plt.subplots(figsize=(9, 4.2))
row, ticks = 0.0, {}
for mode in ("async", "ssp:1", "backup:1", "sync"):
    _, trace = run(mode, pool(4, slow=4.0), epochs=1)
    for worker in (3, 2, 1, 0):
        steps = [step for step in trace.steps if step.worker == worker]
        for used in (True, False):
            bars = [(step.start, step.end - step.start) for step in steps if step.applied == used]
            axis.broken_barh(bars, (row, 0.8), facecolors=colour(mode), edgecolors="white", alpha=1 if used else 0.3)
        row += 1
    ticks[mode] = row - 2.1
    row += 0.7
axis.set_yticks(list(ticks.values()), ticks)
axis.set(xlim=(0, 20), xlabel="seconds", title="bars: a worker computes; gaps: it waits; pale: not applied")
plt.show()

# %% [markdown]
# - **`sync`** waits for the first worker at every step. Three of four workers are idle most of the time.
# - **`backup:1`** goes on when all but one have come. What comes late is thrown away (pale): the slow worker works in
#   vain, and its data are not seen.
# - **`ssp:1`** lets a worker be one step ahead of the slowest. It evens out small differences; but who is slow *always*
#   still sets the pace.
# - **`async`** has no gaps.
#
# ## The price of waiting
#
# Now we make one of eight workers slower and slower, and look how long an epoch takes.

# %%
figure, axis = plt.subplots(figsize=(7, 3.5))
for mode in ("sync", "ssp:1", "backup:1", "async"):
    seconds = []
    for slow in (1, 2, 4, 8, 16):
        store = asynchronous.create_store(mode, np.zeros(1), 8, asynchronous.rules.sgd, lr=0.1)
        trace = simulator.simulate(store, lambda w, batch: (w, 1), pool(8, slow), range(4 * len(y) // BATCH))
        seconds.append(trace.seconds / 4)
    axis.plot([1, 2, 4, 8, 16], seconds, color=colour(mode), marker="o", label=mode)
axis.set(xlabel="how many times slower one worker is", ylabel="seconds per epoch", ylim=(0, None))
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# And if that worker does not come at all? Under `sync` all others wait for ever, unless its death is detected.

# %%
for mode in ("sync", "async"):
    workers = pool(8)
    workers[3] = workers[3]._replace(dies_at=10)
    _, trace = run(mode, workers, epochs=2)
    print(f"{mode:6}", f"stalled after {trace.seconds:.0f} s" if trace.stalled else "went on without it")

# %% [markdown]
# ## The price of not waiting
#
# All workers are equally fast now, so there is nothing to gain. With N of them, a gradient is about N - 1 updates old
# when it arrives. What does that do to the accuracy after the same number of epochs? (Means of three runs; the
# learning rate is bold on purpose. With a timid one staleness hardly shows, and neither does learning.)

# %%
figure, axis = plt.subplots(figsize=(7, 3.5))
counts = (1, 2, 4, 8, 12)
for mode in ("sync", "ssp:1", "dc:10", "async"):
    with np.errstate(over="ignore", invalid="ignore"):
        runs = [[run(mode, pool(count), seed=seed)[0] for seed in range(3)] for count in counts]
    values = [np.mean([accuracy(store.weights) for store in stores]) for stores in runs]
    axis.plot(counts, values, color=colour(mode), marker="o", label=mode)
    if mode == "async":
        for count, stores, value in zip(counts[1:], runs[1:], values[1:]):
            axis.annotate(f"{stores[0].staleness.mean:.0f} old", (count, value - 0.09), ha="center", fontsize=8)
axis.set(xlabel="workers", ylabel="accuracy after 8 epochs", ylim=(0, 1.02))
axis.legend(frameon=False, loc="lower left")
plt.show()

# %% [markdown]
# `async` suffers, and the more, the staler its gradients are. Two remedies give part of it back:
#
# - **`ssp:1`** bounds the staleness: no worker runs far ahead.
# - **`dc:10`** *compensates* for it. A gradient $g$ was taken at $w_\text{old}$ and is applied at $w$. To first order
#   the right one is $g + H\,(w - w_\text{old})$, and $g \odot g$ is a cheap stand-in for the diagonal of the
#   Hessian $H$. So the store applies $g + \lambda\, g \odot g \odot (w - w_\text{old})$, where $w_\text{old}$ is
#   what *this* worker took. That is one line:

# %%
g, w, w_old = np.array([0.5, -0.5]), np.array([1.0, 1.0]), np.array([0.75, 0.75])
print(asynchronous.rules.compensate(g, w, w_old, strength=10.0), "=", g + 10 * g * g * (w - w_old))

# %% [markdown]
# ## Both prices together
#
# What counts in the end is accuracy against *time*. Eight workers again, one of them four times slower.

# %%
figure, axis = plt.subplots(figsize=(8, 4))
for mode in ("sync", "backup:1", "ssp:1", "local:4", "elastic", "async", "dc:10"):
    curve, pushes = [], 0

    def observe(now, store, curve=curve):
        global pushes
        if pushes % 10 == 0:
            curve.append((now, accuracy(store.weights)))
        pushes += 1

    store, trace = run(mode, pool(8, slow=4.0), seed=1, observe=observe)
    axis.plot(*zip(*curve), color=colour(mode), label=f"{mode}: {store.staleness}", linewidth=1.6)
axis.set(xlabel="seconds", ylabel="accuracy", ylim=(0, 1.02))
axis.legend(frameon=False, fontsize=8, loc="lower right")
plt.show()

# %% [markdown]
# Two more settings have appeared. With **`local:4`** every worker trains by itself and all average their weights after
# every fourth step: no faster here, since the slow worker is still waited for, but a quarter of the exchanges. With
# **`elastic`** the workers keep their own weights, which are pulled towards a common centre; no worker waits, and
# no stale gradient reaches another worker's weights directly.
#
# ## At their limits, all are the same
#
# With slack 0, no backup, or averaging after every step, the settings become `sync`; and it becomes plain SGD on a
# larger batch. Good: then differences elsewhere come from what we set, not from how it was programmed.

# %%
reference = run("sync", pool(4))[0].weights
for mode in ("backup:0", "ssp:0", "local:1"):
    print(f"{mode:9} largest difference from sync: {np.abs(run(mode, pool(4))[0].weights - reference).max():.1e}")

# %% [markdown]
# `backup:0` is the same to the last bit, and `local:1` up to rounding: a mean of weights instead of a mean of
# gradients. `ssp:0` differs because our rule has momentum: it makes four small updates where `sync` makes one large
# one, and each of them lets the velocity run on. With plain SGD only rounding is left there, too:

# %%
update = asynchronous.rules.optimizer("sgd")
reference = run("sync", pool(4))[0].weights
for mode in ("backup:0", "ssp:0", "local:1"):
    print(f"{mode:9} largest difference from sync: {np.abs(run(mode, pool(4))[0].weights - reference).max():.1e}")

# %% [markdown]
# ## For real
#
# `gp.asynchronous.Asynchronous` does all this with Gluon nets on real devices: a thread and a net per device
# (hybridized nets must not be shared between threads, so it takes a *function* that makes one). We slow the first
# device down: each net sleeps in its forward pass.

# %%
devices = gp.devices("cpu:3")


workers = itertools.count()


def make_net():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(32, in_units=196, activation="relu"), gluon.nn.Dense(10, in_units=32))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    seconds = 0.04 if next(workers) % len(devices) == 0 else 0.01
    net.register_forward_hook(lambda *_: time.sleep(seconds))
    return net


for mode in ("sync", "async"):
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    parallel = asynchronous.Asynchronous(make_net, loss, devices, mode, "sgd", {"learning_rate": 0.15})
    done = parallel.train(batches(1))
    print(f"{mode:6} {done.seconds:4.1f} s, steps of each device {done.steps}, {parallel.staleness}")

# %% [markdown]
# And its staleness, device by device. The slow device's gradients are the oldest: while it computes, the others
# update, again and again.

# %%
figure, rows = plt.subplots(3, 1, figsize=(7, 3), sharex=True)
for device, axis, histogram in zip(devices, rows, parallel.staleness.histograms):
    axis.bar(list(histogram), list(histogram.values()), color=colour("async"))
    axis.set_ylabel(device, rotation=0, ha="right")
rows[-1].set_xlabel("staleness")
plt.show()

# %% [markdown]
# ## Which one to take
#
# | if | then |
# | --- | --- |
# | your devices are alike, as in one machine | `sync`; there is nothing to gain by not waiting |
# | now and then one hiccups | `ssp:2` |
# | one of many is always slow, and data are plenty | `backup:1` |
# | exchanging is what takes long | `local:8` |
# | devices differ, come and go | `elastic`, or `async` with a small learning rate; `dc` if that is too stale |
#
# ## Exercises
#
# 1. With N equally fast workers, a gradient is N - 1 updates old. Why? Predict the mean staleness if the first of
#    eight workers is four times slower, for it and for the others; then compare with `store.staleness.histograms`.
# 2. Write down two updates with gradient $g/2$ and momentum 0.8, and one with gradient $g$. By how much do they
#    differ? That is the difference between `ssp:0` and `sync`.
# 3. Count the exchanged bytes of an epoch for `sync`, `local:4` and `async`. On which network would you take which?
#
# <details><summary>Answers</summary>
#
# 1. While a worker computes, each of the others pushes once. While the slow one computes, the seven others push four
#    times each: 28. While a fast one computes, six others push once and the slow one a quarter of a time: 6.25. Our
#    run has 31 for the first worker and 6.1 for the others.
# 2. One update moves by $g$ and leaves the velocity $g$. Two move by $0.5\,g$ and $0.8\cdot 0.5\,g + 0.5\,g =
#    0.9\,g$, together $1.4\,g$, and leave the velocity $0.9\,g$.
# 3. The net has 6,634 weights, 26.5 kB in float32, and an epoch 89 batches. With `sync` and `async` a worker fetches
#    the weights and sends a gradient for each batch: 4.7 MB in all. With `local:4` a quarter of it: 1.2 MB. So
#    `local:4` on a slow network, if the accuracy allows; `sync` on a fast one; `async` saves waiting, not bytes.
#
# </details>
