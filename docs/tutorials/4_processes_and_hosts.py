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
# # 4. Processes and hosts
#
# *The same program on two processes, and on two hosts.*
#
# A process runs on one machine. To use the devices of several machines, several processes add up their gradients over a
# network. Two things are new then. All processes have to be **started**, with ports and environment variables that
# fit. And they have to **find each other**, for which there are several engines. This notebook starts them, and
# measures what they exchange.

# %%
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import gluon_parallel as gp  # before MXNet: it makes MXNet 1.9.1 run on today's Python
import mxnet as mx
from mxnet import gluon

plt.rcParams.update({"figure.dpi": 100, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
folder = Path(tempfile.mkdtemp())
digits = gp.datasets.load("digits").train

# %% [markdown]
# ## A function in two processes
#
# For an experiment, a function in a cell is enough. `gp.launch.notebook` copies it to new processes, shows what they
# print, with the rank in front, and returns what they return. Nets, trainers and stores are made inside of the
# function, for the processes share no memory with this notebook. In each of them, `gp.prepare` finds the others, cuts
# every batch of 60 into parts, and sums the gradients.


# %%
def train(images, labels):
    """Train LeNet on one pass over the images; the loss and the weights of the first layer."""
    gp.reseed(0)
    net = gp.models.LeNet()
    net.initialize(mx.init.Xavier(), ctx=gp.devices("auto"))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
    loader = gluon.data.DataLoader(gluon.data.ArrayDataset(images, labels), batch_size=60)
    training, loader = gp.prepare(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer, loader)
    for batch in loader:
        training.step(*batch)
    print(f"process {training.store.rank} of {training.store.num_workers} took {len(loader)} steps")
    return training.mean_loss(), net[0].weight.data().asnumpy()


parts = digits.images[:480], digits.labels[:480]
together = gp.launch.notebook(train, parts, num_processes=2, devices="cpu:1")
[alone] = gp.launch.notebook(train, parts, num_processes=1, devices="cpu:1")
print("loss of each process:", *(f"{loss:.6f}" for loss, _ in together), "| of one alone:", f"{alone[0]:.6f}")
print(f"largest difference of a weight: {max(np.abs(weight - alone[1]).max() for _, weight in together):.1e}")

# %% [markdown]
# An exception in one process ends all of them and is raised here, with its traceback; so does *Interrupt the kernel*.
#
# ## One script, two processes
#
# A training that runs for days, on many hosts, is a script. What changes in it? It creates a **store**, through which
# processes sum their gradients, and gives it to its trainer. The store knows `rank`, which process this is, and
# `num_workers`, how many there are, and with these two numbers every process takes its part of each batch. The rest is
# the program of the second notebook. At the end it saves the weights, so that we can compare them.

# %%
SCRIPT = """
import json, os, sys, time
import numpy as np
import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd

folder = sys.argv[1]
devices = gp.devices("auto")                                    # what the launcher says
store = gp.kvstore.create(os.environ["GLUON_PARALLEL_KVSTORE"])  # what fits the launcher's engine
print(f"process {store.rank} of {store.num_workers} on {devices}")

digits = np.load(sys.argv[2])
batches = gp.datasets.batches(digits["images"], digits["labels"], batch_size=60 // store.num_workers, shuffle=True,
                              rank=store.rank, num_workers=store.num_workers)
gp.reseed(0)
net = gp.models.LeNet()
net.initialize(mx.init.Xavier(), ctx=devices)
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9}, kvstore=store)
step = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer)

for number, (images, labels) in enumerate(batches):
    if number == 8:
        break
    step(images, labels)
gp.checkpoint.save(os.path.join(folder, "checkpoint.npz"), net)  # all processes call it, and process 0 writes

times = {}
for key, size in enumerate([64, 1 << 20], start=1000):          # numbers of four bytes
    array = nd.ones(size)
    store.broadcast(key, array, [array])
    taken = []
    for _ in range(12):
        begin = time.perf_counter()
        store.pushpull(key, [array], out=[array])
        array.wait_to_read()
        taken.append(time.perf_counter() - begin)
    times[4 * size] = sorted(taken)[len(taken) // 2]
if store.rank == 0:
    with open(os.path.join(folder, "times.json"), "w") as file:
        json.dump(times, file)
"""
script = folder / "train.py"
script.write_text(SCRIPT)
data = folder / "digits.npz"  # all processes read the same file, and each takes its part of every batch
np.savez(data, images=digits.images, labels=digits.labels)


def launch(name, engine="mpi"):
    """Start two processes, show what they say, and return how it ended with the weights and the times."""
    (folder / name).mkdir()
    with contextlib.redirect_stderr(sys.stdout):
        result = gp.launch.launch(
            script,
            [folder / name, data],
            num_workers=2,
            engine=engine,
            devices="cpu:1",
            logs=folder / name,
        )
    arrays, _ = gp.archive.read(folder / name / "checkpoint.npz")
    weights = {key: array for key, array in arrays.items() if key.startswith("parameters/")}
    return result, weights, json.loads((folder / name / "times.json").read_text())


# %% [markdown]
# `gp.launch.launch(...)` is the command
#
#     gluon-parallel launch -n 2 --devices cpu:1 train.py ...
#
# as a function. Every line of output comes with the rank of its process in front, and is kept in a file per rank.

# %%
result, weights, times_of_mpi = launch("mpi")
print("exit code", result.exit_code, "| logs:", sorted(path.name for path in result.logs.glob("*.log")))

# %% [markdown]
# Two processes with 30 samples each did what one does with 60. Here is that one, in this notebook:

# %%
gp.reseed(0)
net = gp.models.LeNet()
net.initialize(mx.init.Xavier())
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
step = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), trainer)
for number, (images, labels) in enumerate(gp.datasets.batches(*digits, batch_size=60, shuffle=True)):
    if number == 8:
        break
    step(images, labels)
alone = {key: array for key, array in gp.checkpoint.state(net).arrays.items() if key.startswith("parameters/")}
difference = max(np.abs(alone[key] - weights[key]).max() for key in alone)
print(f"largest difference of any weight after 8 steps: {difference:.1e}")

# %% [markdown]
# That is float32 rounding: the sums are the same, in another order. `gluon-parallel parity` makes this comparison for
# you, in float64, for every parameter.
#
# ## What each engine does
#
# | `--engine` | store | who adds up | processes |
# | --- | --- | --- | --- |
# | `mpi` | `mpi` | the workers, among themselves | `mpirun` starts the workers; between hosts it uses ssh |
# | `ps` | `dist_sync` | servers, which keep every key and answer when all have sent | a scheduler, servers, workers |
# | `horovod` | `horovod` | the workers, in a ring | `horovodrun` starts the workers; an optional extra |
#
# The same script under MXNet's parameter servers. Watch what is started: nothing in the script has changed.

# %%
result, weights_of_ps, times_of_ps = launch("ps", engine="ps")
print("exit code", result.exit_code, "| logs:", sorted(path.name for path in result.logs.glob("*.log")))
difference = max(np.abs(weights_of_ps[key] - weights[key]).max() for key in weights)
print(f"largest difference between the engines: {difference:.1e}")

# %% [markdown]
# They agree about the sum and differ in the way there. A small message shows the latency, which SyncBatchNorm pays
# twice per layer; a large one shows the bandwidth, which gradients need.

# %%
figure, axes = plt.subplots(figsize=(6, 2.6), layout="constrained")
labels = ["256 bytes", "4 MB"]
for place, (name, times) in enumerate({"mpi": times_of_mpi, "ps": times_of_ps}.items()):
    values = [1000 * value for value in times.values()]
    bars = axes.barh(np.arange(2) + 0.38 * place, values, 0.36, label=name)
    axes.bar_label(bars, [f" {value:.2f} ms" for value in values])
axes.set(xscale="log", xlabel="one exchange between two processes, ms (median of 12)")
axes.set_yticks(np.arange(2) + 0.19, labels)
axes.margins(x=0.25)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# On two cores that other programs use as well, these numbers are rough. Between hosts the network dominates both.
#
# ## Two hosts
#
# The hosts are named with the number of processes that each takes:
#
#     gluon-parallel launch --hosts h1:2,h2:2 train.py
#
# The script and the Python environment must be at the same paths on all of them, and `ssh h2` must work without a
# password. Two machines do not fit into a notebook, but Linux can split one: a *network namespace* has its own network
# card and its own ports, and its processes reach the others over a cable only. Making one needs root, so the next cell
# says when it had to leave this out.

# %%
NETWORK = """
set -e
ip netns add {0}; ip netns add {1}
ip link add gpt0 netns {0} type veth peer name gpt1 netns {1}
for host in "{0} gpt0" "{1} gpt1"; do
    set -- $host
    ip -n $1 addr add $1/24 dev $2; ip -n $1 link set lo up; ip -n $1 link set $2 up
done
"""
# In place of ssh: run a command on the other side of the cable, under a host name of its own.
SHELL = """#!/bin/sh
host=$1; shift
exec unshare --uts ip netns exec "$host" sh -c 'hostname "host-$0"; exec sh -c "$1"' "$host" "$*"
"""


def on_two_hosts():
    """The same script, one process on each of two hosts; the exit code, or why that is not possible here."""
    names = [f"10.78.{os.getpid() % 250}.{number}" for number in (1, 2)]
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "left out: network namespaces need root and the command `ip`"
    made = subprocess.run(["sh", "-c", NETWORK.format(*names)], capture_output=True, text=True)
    try:
        if made.returncode:
            return f"left out: {made.stderr.strip()}"
        shell = folder / "shell"
        shell.write_text(SHELL)
        shell.chmod(0o755)
        (folder / "hosts").mkdir()
        command = f"{sys.executable} -m gluon_parallel launch --hosts {names[0]}:1,{names[1]}:1 --rsh {shell}"
        command += f" --devices cpu:1 --logs {folder / 'hosts'} {script} {folder / 'hosts'} {data}"
        done = subprocess.run(
            [shell, names[0], command], text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=100,
        )  # fmt: skip
        print(done.stdout.strip())
        return f"exit code {done.returncode}"
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


print(on_two_hosts())
shutil.rmtree(folder)

# %% [markdown]
# ## Exercises
#
# 1. Let `train` raise an exception in process 1 only, before its third step. What does the notebook show, and how
#    does process 0 know?
# 2. Start `train` in three processes. What has to change in it, and how large is the difference from one process?
# 3. `mpirun -n 2 python train.py` works without the launcher, if the script says `gp.kvstore.create("auto")`. What do
#    you lose?
#
# <details><summary>Answers</summary>
#
# 1. Both tracebacks as they happen, and then `WorkerFailed` in the cell, with that of process 1: it is the first
#    failure. Process 1 tells the others why it ends, and process 0, which waits for it in its third step, raises
#    `WorkerLost: ... process 1 has ended its program with ValueError`.
# 2. Nothing: `gp.prepare` cuts each batch of 60 into three parts. The difference is float32 rounding, about 1e-8.
# 3. Whoever watches the processes: a log per rank, the sentence that names the first failure, an end of the others
#    within seconds, time for a last checkpoint after SIGTERM, and `--max-restarts`.
#
# </details>
