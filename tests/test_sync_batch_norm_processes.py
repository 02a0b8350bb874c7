"""SyncBatchNorm over processes: two or three workers of two devices each, joined by MXNet's own dist_sync store."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import sys
import gluon_parallel as gp
import mxnet as mx
import numpy as np
if {role!r} != "worker":
    from mxnet import kvstore_server  # serves until the workers are done, and ends this process
    sys.exit()
from batch_norm_reference import close, joint, on, reference, shards

devices = gp.devices("cpu:2")
rng = np.random.default_rng({seed})
store = mx.kv.create("dist_sync")
if {kind!r} == "layer":
    net = mx.gluon.nn.HybridSequential()
    for _ in range(2):
        net.add(gp.nn.SyncBatchNorm(in_channels=3, kvstore=store, timeout=60))
    net.initialize(ctx=devices)
    net.hybridize()
else:
    y = x = mx.sym.var("x")
    for name in ("one", "two"):
        y = gp.nn.sync_batch_norm_symbol(
            y, name=name, num_devices=2, kvstore=store, timeout=60, eps=1e-5, fix_gamma=True
        )
    net = mx.gluon.SymbolBlock(y, x)
    net.initialize(mx.init.Zero(), ctx=devices)
mine = slice(2 * store.rank, 2 * store.rank + 2)
for step in range(10):
    x, heads = (shards(rng, (3, 1, 2, 4, 1, 5)[: 2 * store.num_workers], (3, 4), offset=offset) for offset in (1e3, 0))
    xs = on(devices, x[mine])
    ys = joint(net, xs, on(devices, heads[mine], grad=False))
    one, zero = np.ones(3), np.zeros(3)
    between = reference(x, heads, one, zero)[0]
    y, dbetween = reference(between, heads, one, zero)[:2]
    dx = reference(x, dbetween, one, zero)[1]
    close(np.concatenate([a.asnumpy() for a in ys]), np.concatenate(y[mine]), 1e-5, "output")
    close(np.concatenate([a.grad.asnumpy() for a in xs]), np.concatenate(dx[mine]), 1e-5, "gradient")
print("rank", store.rank, "agrees with one device")
"""


@pytest.mark.parametrize(
    ("kind", "num_workers"), [("layer", 2), pytest.param("layer", 3, marks=pytest.mark.slow), ("symbol", 2)]
)
def test_processes_with_several_devices_each_are_one_batch(seed, kind, num_workers):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    roles = ["scheduler", "server"] + ["worker"] * num_workers
    processes = []
    for role in roles:
        environment = {
            **os.environ,
            "DMLC_ROLE": role, "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_SERVER": "1", "DMLC_NUM_WORKER": str(num_workers), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        command = [sys.executable, "-c", WORKER.format(role=role, seed=seed, kind=kind)]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes[::-1]]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for output in outputs[:num_workers]:
        assert "agrees with one device" in output, output
