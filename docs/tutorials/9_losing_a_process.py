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
# # 9. Losing a process
#
# *What happens when one of several processes dies: all end, all start again, the others go on, or a new one joins.*
#
# A long training loses processes: memory runs out, a machine is switched off, a scheduler takes it back. The others
# then wait for gradients that never come. This notebook kills one of three processes in the middle of an epoch, with
# the signal that no program can catch, and compares four answers.

# %%
import contextlib
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import gluon_parallel as gp

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
temporary = tempfile.TemporaryDirectory()
folder = Path(temporary.name)

# %% [markdown]
# ## A training that can be killed
#
# `gp.Run` keeps a checkpoint at the end of each epoch, from which the script continues when it is started again. Every
# process notes when it has finished a step. Process 1 kills itself in the second of two epochs, in the first attempt.
# Two epochs take a few seconds; `pause` makes the steps of the second one longer, for the last answer.

# %%
SCRIPT = """
import os, signal, sys, time
import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

folder, dies, pause = sys.argv[1], sys.argv[2] == "dies", float(sys.argv[3])
rank, attempt = os.environ["GLUON_PARALLEL_RANK"], os.environ["GLUON_PARALLEL_RESTART"]
gp.reseed(0)
data = gluon.data.ArrayDataset(*gp.datasets.load("digits").train)
loader = gluon.data.DataLoader(data, batch_size=60, shuffle=True)
net = gp.models.LeNet()
net.initialize(mx.init.Xavier(), ctx=gp.devices("auto"))
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
loss = gluon.loss.SoftmaxCrossEntropyLoss()
training, loader = gp.prepare(net, loss, trainer, loader, run=gp.Run(folder))

for epoch in training.epochs(2):
    for batch in loader:
        if dies and (rank, attempt, training.num_steps) == ("1", "0", len(loader) + 12):
            os.kill(os.getpid(), signal.SIGKILL)
        training.step(*batch)
        time.sleep(pause * epoch)
        with open(os.path.join(folder, f"steps-{rank}.txt"), "a") as file:
            file.write(f"{time.time()} {attempt}\\n")
    training.end_epoch()
gp.checkpoint.save(os.path.join(folder, "weights.npz"), net)
"""
script = folder / "train.py"
script.write_text(SCRIPT)


def launch(name, dies="dies", pause=0, **options):
    """Start three processes, show what they say, and return how it ended."""
    (folder / name).mkdir()
    options.update(num_workers=3, devices="cpu:1", logs=folder / name / "logs")
    with contextlib.redirect_stderr(sys.stdout):
        return gp.launch.launch(script, [folder / name, dies, pause], **options)


def weights(name):
    arrays, _ = gp.archive.read(folder / name / "weights.npz")
    return arrays


# %% [markdown]
# For comparison, first without a death:

# %%
result = launch("undisturbed", dies="no")

# %% [markdown]
# ## First answer: all end
#
# The launcher watches every process from outside. The end of one is named to all, and all are ended, with their
# children. The exit code is 128 + 9, the number of the signal.

# %%
result = launch("ended")
print("exit code", result.exit_code)

# %% [markdown]
# ## Second answer: all start again
#
# `max_restarts=1` (`gluon-parallel launch --max-restarts 1`) starts the whole group once more. The second attempt finds
# the checkpoint of the first epoch, and repeats the steps since.

# %%
result = launch("started again", max_restarts=1)
print("exit code", result.exit_code, "| restarts:", result.num_restarts)

# %% [markdown]
# ## Third answer: the others go on
#
# `min_processes=2` (`--min-processes 2`) lets the two that are left meet without the third. They forget what of the
# step is half done, and divide its batch and all later ones between them.

# %%
result = launch("gone on", min_processes=2)
print("exit code", result.exit_code, "| restarts:", result.num_restarts)

# %% [markdown]
# ## Fourth answer: another one joins
#
# With `max_processes=3` (`--max-processes 3`) as well, a new process starts in the place of the lost one while the
# others train. It runs the script from its beginning; in `gp.prepare` it gets the weights, the optimizer's state and
# the position in the epoch, and takes part from the next step on. It has a number of its own, 3: none is used twice.

# %%
result = launch("another joined", min_processes=2, max_processes=3, pause=0.3)
print("exit code", result.exit_code, "| restarts:", result.num_restarts)

# %% [markdown]
# ## What it costs
#
# Each line is a step that a process has finished, the cross is the last step of the one that dies.

# %%
names = ["undisturbed", "ended", "started again", "gone on", "another joined"]
figure, axes = plt.subplots(len(names), figsize=(9, 6.5), sharex=True, layout="constrained")
for axis, name in zip(axes, names):
    steps = {int(path.stem[-1]): np.loadtxt(path, ndmin=2) for path in (folder / name).glob("steps-*.txt")}
    begin = min(times[0, 0] for times in steps.values())
    for rank, times in steps.items():
        axis.plot(times[:, 0] - begin, np.full(len(times), rank), "|", color=f"C{rank}", markersize=12)
    first = steps[1][steps[1][:, 1] == 0]
    if name != "undisturbed":
        axis.plot(first[-1, 0] - begin, 1, "x", color="black", markersize=9, markeredgewidth=2)
    axis.set(title=name, yticks=sorted(steps), ylim=(max(steps) + 0.6, -0.6), ylabel="process")
axes[-1].set_xlabel("s since the first step")
plt.show()

# %% [markdown]
# A restart costs the start of all processes, and the steps since the last checkpoint; going on costs a new meeting and
# one step. While a new process starts, the others train; they wait for it only in the short meeting. And the result?

# %%
for name in names[2:]:
    pairs = zip(weights("undisturbed").values(), weights(name).values())
    print(f"{name}: largest difference of a weight {max(np.abs(a - b).max() for a, b in pairs):.1e}")
temporary.cleanup()

# %% [markdown]
# A restart repeats the same sums, so the weights are the same, bit for bit. The two processes that go on see the same
# 60 samples per step and add their gradients in another order: the difference is float32 rounding, after all steps that
# followed; so it is with the new process. No sample was left out or read twice.
#
# | | all start again | the others go on | another one joins |
# | --- | --- | --- | --- |
# | a process is killed, or a host other than the launcher's is lost | yes | yes | yes |
# | a process raises an error | yes, and it may raise again | no: it would raise in the others, too | no |
# | engines | all | `mpi` | `mpi` |
# | afterwards | as many processes as before | fewer | as many as before |
#
# A restart can be named together with the others, for losses after which they cannot go on. A loop of your own around
# `gp.DataParallel` or `gluon.Trainer` hands its step and its loaders to `gp.survive`;
# `docs/howto/losing_processes.md` has the details. A process that is *stopped* or hangs keeps its connections and sends
# nothing: it is lost within `--timeout` seconds (60).
#
# ## Exercises
#
# 1. Let process 1 raise an exception in place of killing itself. Which exit codes do the three answers have?
# 2. Let process 0 die, with `min_processes=2`. Who prints the second epoch's line, and who writes `weights.npz`?
# 3. Move the death into the first epoch, before there is a checkpoint. From where does the second attempt start?
# 4. A training on 64 processes loses one of them per day, a start takes two minutes, and a step two seconds. How
#    often should it write checkpoints if writing one takes ten seconds: with restarts, and with `min_processes`?
#
# <details><summary>Answers</summary>
#
# 1. 1, 0 and 1. An exception ends the program with status 1, not by a signal. The restart succeeds, for only the
#    first attempt raises. With `min_processes` the others do not go on: an exception would be raised in them, too.
# 2. Process 1, which is the first of those that are left, prints and writes; the exit code is 0.
# 3. From the first step of the first epoch, with the weights of the seed.
# 4. With restarts, a checkpoint every T seconds costs $10 / T$ of the time, and a loss per day costs the start and on
#    average $T / 2$ of repeated work, $T / 172{,}800$: together least for $T = \sqrt{10 \cdot 172{,}800} \approx
#    1{,}300$ s, some 22 minutes. With `min_processes` a loss repeats one step, so checkpoints are for what ends the
#    whole training: a few per day will do.
#
# </details>
