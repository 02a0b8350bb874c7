"""A loop that reads a result before it has launched all devices ends early with an error; a slow device does not."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from gluon_parallel.mxnet.device_threads import stuck

# (devices take part in one net; `form` says what the loop does between the launches)
PROGRAM = """
import json, sys, threading, time
import gluon_parallel as gp, mxnet as mx
from mxnet import autograd, gluon, nd

forms, hybridize = json.loads(sys.argv[1]), sys.argv[2] == "hybridize"
devices = [mx.cpu(0), mx.cpu(1)]
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Conv2D(4, 3, in_channels=3), gp.nn.SyncBatchNorm(in_channels=4), gluon.nn.Dense(2, in_units=4 * 36))
net.initialize(ctx=devices)
if hybridize:
    net.hybridize()
loss, metric = gluon.loss.SoftmaxCrossEntropyLoss(), mx.metric.Accuracy()
shards = [(nd.ones((2, 3, 8, 8), ctx=d), nd.zeros(2, ctx=d)) for d in devices]

def forward(x, y):
    with autograd.record():
        out = net(x)
        return out, loss(out, y)

def one_after_the_other(between):
    losses = []
    for number, (x, y) in enumerate(shards):
        out, l = forward(x, y)
        between(number, y, out, l)
        losses.append(l)
    autograd.backward(losses)
    nd.waitall()

def read_in_parallel_apply():
    gp.parallel_apply(lambda x, y: forward(x, y)[1].mean().asscalar(), shards)

def read_a_gradient():
    losses = [l for _, l in gp.parallel_apply(forward, shards)]
    for l, device in zip(losses, devices):
        l.backward()
        net[0].weight.grad(device).asnumpy()

def a_thread_per_device(slow):
    errors = []
    def train(number):
        try:
            if number:
                slow()
            _, l = forward(*shards[number])
            l.backward()
            l.asnumpy()  # each thread waits for its own device alone, which is right here
        except gp.errors.GluonParallelError as error:
            errors.append(error)
    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error

def compute_long():  # another result, which does not depend on the devices that wait
    a = nd.ones((1400, 1400), ctx=mx.cpu(2))
    began, num = time.monotonic(), 4
    nd.dot(a, a).wait_to_read()
    b = a
    for _ in range(int(3 / (time.monotonic() - began)) + 1):
        b = nd.dot(b, a) / 1400
    b.wait_to_read()  # one wait of some 3 seconds

LOOPS = {
    "asscalar": lambda: one_after_the_other(lambda n, y, out, l: l.mean().asscalar()),
    "waitall": lambda: one_after_the_other(lambda n, y, out, l: nd.waitall()),
    "metric": lambda: one_after_the_other(lambda n, y, out, l: metric.update([y], [out])),
    "parallel_apply": read_in_parallel_apply,
    "gradient": read_a_gradient,
    "sleep": lambda: one_after_the_other(lambda n, y, out, l: n or time.sleep(3)),
    "thread that sleeps": lambda: a_thread_per_device(lambda: time.sleep(3)),
    "thread that computes": lambda: a_thread_per_device(compute_long),
    "stopped": lambda: one_after_the_other(lambda n, y, out, l: (print("stop me", flush=True), sys.stdin.readline())),
}
results = {}
for form in forms:
    try:
        LOOPS[form]()
        results[form] = ["fine", ""]
    except gp.errors.GluonParallelError as error:
        results[form] = [type(error).__name__, str(error)]
print("result" + json.dumps(results))
"""
WRONG = ["asscalar", "waitall", "metric", "parallel_apply", "gradient"]
RIGHT = ["sleep", "thread that sleeps", "thread that computes"]
LINES = {"metric": "metric.update", "gradient": "grad(device).asnumpy"}


def start(folder, forms, hybridize):
    script = folder / "program.py"
    script.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, str(script), json.dumps(forms), "hybridize" if hybridize else "no"],
        env={**os.environ, "GLUON_PARALLEL_TIMEOUT": "200"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def results_of(process, said=""):
    more, _ = process.communicate(timeout=250)
    found = re.search("^result(.*)$", said + more, re.MULTILINE)
    assert process.returncode == 0 and found, said + more
    return json.loads(found.group(1))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{(form, hybridize): what its loop came to}; most of the programs' time is waiting, so they wait side by side."""
    programs = [(WRONG[:3], True), (WRONG[3:], True), (["asscalar", "parallel_apply"], False), (RIGHT, True)]
    processes = [start(tmp_path_factory.mktemp("loops"), *program) for program in programs]
    try:
        return {
            (form, hybridize): result
            for process, (_, hybridize) in zip(processes, programs)
            for form, result in results_of(process).items()
        }
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("hybridize", [True, False])
def test_a_result_that_is_read_too_early_ends_in_an_error_that_names_the_line(results, hybridize):
    for form in WRONG if hybridize else ["asscalar", "parallel_apply"]:
        kind, message = results[form, hybridize]
        assert kind == "DeviceNotLaunched", f"{form}: {kind} {message}"
        direction = "backward" if form == "gradient" else "forward"
        assert re.search(
            rf"batchnorm0, {direction} \d+: cpu\(0\) waits for cpu\(1\), whose {direction} pass is not", message
        )
        assert re.search(r"program\.py, line \d+, in ", message), message
        assert LINES.get(form, form) in message
        assert "losses = [loss(net(x), y) for x, y in zip(xs, ys)]" in message


@pytest.mark.parametrize("form", RIGHT)
def test_a_slow_device_is_waited_for(results, form):
    assert results[form, True][0] == "fine"


def test_a_process_that_is_stopped_for_a_while_is_not_taken_for_a_loop_that_cannot_work(tmp_path):
    process = start(tmp_path, ["stopped"], True)
    said = process.stdout.readline()
    assert said == "stop me\n"
    time.sleep(0.3)  # the first device waits by now
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    process.stdin.write("go on\ngo on\n")
    process.stdin.flush()
    assert results_of(process)["stopped"][0] == "fine"


@pytest.mark.parametrize(
    ("times", "computes"),
    [
        ({7: (5.0, 1.0)}, False),
        ({7: (5.2, 1.0)}, True),
        ({7: (5.0, 1.9)}, True),  # others had the cores for most of the time
        ({7: (5.0, 1.1), 8: (0.0, 1.9)}, False),  # number 8 waits in a layer
        ({7: (5.0, 1.0), 10: (0.2, 0.0)}, True),  # a new thread
    ],
)
def test_a_thread_that_other_programs_keep_from_the_cores_computes(monkeypatch, times, computes):
    loop = stuck.StuckLoop()
    loop._since, loop._times = 100.0, {7: (5.0, 1.0), 8: (0.0, 0.0), 9: (3.0, 0.0)}  # number 9 has ended since
    monkeypatch.setattr(stuck, "_asked", {7: 99.0, 8: 101.0})
    assert loop._computes(101.6, times) is computes


FAILS = """
import gluon_parallel as gp, mxnet as mx
from mxnet import autograd, gluon, nd
devices = [mx.cpu(0), mx.cpu(1)]
net = gp.nn.SyncBatchNorm(in_channels=3)
net.initialize(ctx=devices)
with autograd.record():
    net(nd.ones((2, 3), ctx=devices[0]))
raise ValueError("mine")
"""


def test_an_exception_between_the_launches_ends_the_program_soon_and_is_told_alone():
    done = subprocess.run([sys.executable, "-c", FAILS], env={**os.environ, "GLUON_PARALLEL_TIMEOUT": "100"},
                          capture_output=True, text=True, timeout=250)  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: mine"), done.stderr
