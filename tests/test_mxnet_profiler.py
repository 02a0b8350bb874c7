"""What would end the process while MXNet's profiler runs: each program is a process of its own."""

import os
import subprocess
import sys

import pytest
from processes import PYTHONPATH

import mxnet as mx
from gluon_parallel.mxnet.profiler import NUM_CPUS, has_place_for

BEGINNING = """
import gc, threading
import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon
from gluon_parallel.pipeline.profile import peaks

far = mx.cpu(500)

def dense(*devices):
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(1, in_units=3), gluon.nn.Dense(1, in_units=1))
    net.initialize(ctx=list(devices))
    return net

def all_on_another_device():
    net = dense(far)
    net.hybridize(static_alloc=True, static_shape=True)  # whose memory is no Python object's
    net(mx.nd.ones((2, 3), far)).wait_to_read()
    with mx.autograd.record():
        out = dense(far)(mx.nd.ones((2, 3), far))
    out.backward()
    return [net, out, mx.nd.sparse.zeros("row_sparse", (2, 3), far)]
"""
OF_MEMORY = """
freed = all_on_another_device()
assert peaks([mx.cpu(0)], lambda: (freed.clear(), gc.collect(), mx.nd.zeros(1000))) == [4000]
"""
OF_STEPS = """
freed, net = all_on_another_device(), dense(mx.cpu(0))
parallel = gp.DataParallel(net, gluon.loss.L2Loss(), gluon.Trainer(net.collect_params(), "sgd"))
with gp.profile("profile", steps=2, skip=1):
    for number in range(3):
        if number == 1:
            freed.clear()
            gc.collect()
        parallel.step(mx.nd.ones((2, 3)), mx.nd.ones((2, 1)))
"""
OF_A_PIPELINE_THERE = """
pipe = gp.Pipeline(dense(mx.cpu(0)), [mx.cpu(0), far], 2)
trainer = gluon.Trainer(pipe.collect_params(), "sgd")
profile = pipe.profile(gluon.loss.L2Loss(), trainer, mx.nd.ones((2, 3)), mx.nd.ones((2, 1)))
assert profile.peaks == [None, None] and len(profile.passes[0]) == 8 and str(profile)
"""
# MXNet counts the calls that a thread is in, and ends the process at the end of one that it has not seen begin.
BESIDE_A_CALL = """
has_begun, may_end = threading.Event(), threading.Event()

@mx.operator.register("waits")
class Waits(mx.operator.CustomOpProp):
    def infer_shape(self, shapes):
        has_begun.set()
        may_end.wait()
        return shapes, shapes, []

    def create_operator(self, *_):
        return mx.operator.CustomOp()

def function():
    may_end.set()
    thread.join()

thread = threading.Thread(target=mx.nd.Custom, args=[mx.nd.ones(3)], kwargs={"op_type": "waits"})
thread.start()
has_begun.wait()
peaks([mx.cpu(0)], function)
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(OF_MEMORY, id="arrays are freed on a device that is not counted, while memory is counted"),
        pytest.param(OF_STEPS, id="arrays are freed on such a device, while operators are recorded"),
        pytest.param(OF_A_PIPELINE_THERE, id="a pipeline is measured on such a device"),
        pytest.param(BESIDE_A_CALL, id="another thread is in a call of MXNet's when the profiler starts"),
    ],
)
def test_a_profile_does_not_end_the_process(program, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + program + "print('ok')"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done


def test_the_profiler_has_a_place_for_two_cpu_devices_more_than_cores():
    places = [has_place_for(mx.cpu(number)) for number in range(NUM_CPUS + 4)]
    assert places == [True] * (NUM_CPUS + 2) + [False] * 2
    assert has_place_for(mx.gpu(31)) and has_place_for(mx.cpu_pinned(0))
