"""SyncBatchNorm in a graph over two processes of two devices each, joined by MXNet's own dist_sync store."""

from processes import ROOT, run_servers

WORKER = """
import sys
import gluon_parallel as gp
import mxnet as mx
import numpy as np
folder, seed = sys.argv[1:]
sys.path.insert(0, folder)
from batch_norm_reference import close, joint, on, reference, shards

devices = gp.devices("cpu:2")
rng = np.random.default_rng(int(seed))
store = mx.kv.create("dist_sync")
y = x = mx.sym.var("x")
for name in ("one", "two"):
    y = gp.nn.sync_batch_norm_symbol(y, name=name, num_devices=2, kvstore=store, timeout=60, eps=1e-5, fix_gamma=True)
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


def test_symbols_in_processes_with_several_devices_each_are_one_batch(seed, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    status, said = run_servers(2, script, str(ROOT / "tests/support"), str(seed), seconds=280)
    assert status == 0 and said.count("agrees with one device") == 2, said
