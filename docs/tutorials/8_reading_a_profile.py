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
# # 8. Reading a profile
#
# *Where the time of a step goes, and what to do about it.*
#
# A training loop works, and is slower than it should be. Guessing why is slow, too: MXNet computes in the background,
# so a stopwatch around a line measures how long Python waits there, not what the line costs. `gp.profile` watches
# devices, launches and the script on one clock. This notebook takes a loop with two flaws and removes them in turn.

# %%
import tempfile
import time

import matplotlib.pyplot as plt
import numpy as np

import gluon_parallel as gp  # before MXNet: it makes MXNet 1.9.1 run on today's Python
import mxnet as mx
from mxnet import gluon

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
devices = gp.devices("cpu:2")
digits = gp.datasets.load("digits").train

# %% [markdown]
# ## A slow loop
#
# It reads a batch, which takes 100 ms (a slow disk, or augmentation), makes a step, and looks at the loss for its
# progress bar.


# %%
def make_step():
    net = gp.nn.convert_for_cpu(gp.models.LeNet(num_classes=10))
    net.initialize(mx.init.Xavier(), ctx=devices)
    net.hybridize(static_alloc=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05})
    return gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer)


def read(number):
    time.sleep(0.1)
    rows = np.arange(number * 256, (number + 1) * 256) % len(digits.labels)
    return mx.nd.array(digits.images[rows]), mx.nd.array(digits.labels[rows])


def slow_loop():
    step = make_step()
    for number in range(15):
        images, labels = read(number)
        loss = step(images, labels)
        loss.asscalar()  # for the progress bar


# %% [markdown]
# The first steps are left out: in them MXNet makes its buffers. The next ten are recorded, and a summary is printed.


# %%
def profile(loop):
    with tempfile.TemporaryDirectory() as folder, gp.profile(folder, steps=10, skip=4) as found:
        loop()
    return found.analysis


profiles = {"as it is": profile(slow_loop)}

# %% [markdown]
# Read it from the bottom. The last lines are **findings**: sentences with a number and with what to do, the costliest
# first. Above them, every moment of a device belongs to exactly one row, so the rows of a column add up to a step.
# Where several things happen at once, the first row counts: whatever is hidden behind computing costs nothing.
#
# Only `forward`, `backward` and `update` are work. `script` is the loop itself, here reading a batch and waiting for
# the loss; `launching` is Python, which has not yet launched the device's next operator.
#
# ## First flaw: waiting for a result
#
# `asscalar` waits for the step's forward pass, and only then the next batch is read: the backward pass alone hides a
# part of that. Without it, the loop reads the next batch while the devices compute the whole step. A loss from some
# steps ago is good enough for a progress bar.


# %%
def without_waiting():
    step = make_step()
    for number in range(15):
        images, labels = read(number)
        step(images, labels)


profiles["no waiting"] = profile(without_waiting)

# %% [markdown]
# ## Second flaw: the data
#
# Where reading takes longer than computing, it cannot be hidden behind it, and the devices still wait for the script.
# Others can read ahead (`gluon.data.DataLoader(num_workers=...)` does), or the data can be prepared once, as here.


# %%
def prepared():
    step = make_step()
    batches = [read(number) for number in range(15)]
    for images, labels in batches:
        step(images, labels)


profiles["data prepared"] = profile(prepared)

# %% [markdown]
# ## All three
#
# The same as a picture, with the mean over both devices. Blue and green is work; grey, the script, has gone.

# %%
activities = {
    "forward": "#7aa6d8", "backward": "#3d6fb4", "update": "#3f9c8f", "sum over devices": "#86b65a",
    "waiting for other devices": "#f0a23b", "launching": "#e8cf52", "script": "#a9adb4", "engine": "#5f6b7a",
}  # fmt: skip
figure, axis = plt.subplots(figsize=(9, 2.6))
left = np.zeros(len(profiles))
for activity, colour in activities.items():
    milliseconds = np.array([analysis.seconds(activity) * 1e3 for analysis in profiles.values()])
    axis.barh(list(profiles), milliseconds, left=left, color=colour, label=activity)
    left += milliseconds
axis.invert_yaxis()
axis.set(xlabel="ms per step")
axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
figure.tight_layout()

# %% [markdown]
# ## In your own training
#
# - `gluon-parallel profile train.py` does the same for a script as it is, and `gluon-parallel profile launch -n 2
#   --devices cpu:1 train.py` for several processes, with rows for what is exchanged, for waiting for a late process,
#   and for how much of the exchange is hidden behind the backward pass.
# - Beside the summary there is a page with plots, `profile.html`, and a trace for Perfetto, `profile.json`, with every
#   single operator.
# - A profile of a machine that does other work shows that work, too: the page says how many cores other programs took.
#
# ## Exercises
#
# 1. Put `loss.asscalar()` back into the last loop, for every step and for every fifth. What does it cost now, and why
#    less than in the first loop?
# 2. Take a batch of 32 instead of 256, and a net that is not hybridized. Which activities grow, relative to the step?
# 3. Run `while True: pass` in another terminal. What does the profile say?
#
# <details><summary>Answers</summary>
#
# 1. In our run, nothing for every fifth step, and 2 of 41 ms for every one. The next batch is there already, so
#    Python launches the next step as soon as it has read the loss, which is there before the backward pass ends. In
#    the first loop reading the next batch had to wait for that, too.
# 2. `launching`, `engine` and `update`: their time does not depend on the number of samples. In our run, of a step of
#    9 ms, the engine took 1.1, a finding says so, and recommends a larger batch.
# 3. Steps took three times as long in our run, `forward` and `backward` most of all, since the devices share their
#    cores with it. The finding is "Other programs take 43% of the 2 cores".
#
# </details>
