import os
import subprocess
import sys

import pytest

import gluon_parallel as gp
import mxnet as mx


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("cpu", [mx.cpu(0)]),
        ("cpu:3", [mx.cpu(0), mx.cpu(1), mx.cpu(2)]),
        ("cpu@0,2", [mx.cpu(0), mx.cpu(2)]),
        ("cpu(1)", [mx.cpu(1)]),
        (" CPU:2 ", [mx.cpu(0), mx.cpu(1)]),
        (mx.cpu(1), [mx.cpu(1)]),
        ([mx.cpu(1), "cpu"], [mx.cpu(1), mx.cpu(0)]),
        (("cpu:2", "cpu(5)"), [mx.cpu(0), mx.cpu(1), mx.cpu(5)]),
    ],
)
def test_a_spec_becomes_the_devices_it_names(spec, expected):
    assert gp.devices(spec) == expected


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 2)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [("gpu", [0, 1]), ("gpu:1", [0]), ("gpu@1", [1]), ("gpu@1,0", [1, 0]), ("auto", [0, 1])],
)
def test_gpus_are_found_where_there_are_some(two_gpus, spec, expected):
    assert gp.devices(spec) == [mx.gpu(number) for number in expected]


def test_a_gpu_that_is_not_there_is_refused_by_name(two_gpus):
    with pytest.raises(gp.errors.DeviceUnavailable, match=r"gpu\(2\) in 'gpu:3' is not there.*gpu\(0\) to gpu\(1\)"):
        gp.devices("gpu:3")


@pytest.mark.parametrize("spec", ["gpu", "gpu:2", "gpu@0", mx.gpu(0)])
def test_without_a_gpu_every_gpu_is_refused_with_the_reason(monkeypatch, spec):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 0)
    with pytest.raises(gp.errors.DeviceUnavailable, match="no GPU"):
        gp.devices(spec)


def test_auto_without_a_gpu_is_two_cpu_devices_where_there_are_two_cores(monkeypatch):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert gp.devices("auto") == [mx.cpu(0), mx.cpu(1)]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert gp.devices("auto") == [mx.cpu(0)]


UNREADABLE = ["tpu", "cpu:0", "cpu:", "gpu@", "gpu@a", "cpu:2,3", "", [], 2, None, ["cpu", "cpu:2"]]


@pytest.mark.parametrize("spec", UNREADABLE)
def test_what_cannot_be_read_is_refused(spec):
    with pytest.raises(gp.errors.DeviceUnavailable, match="expected|more than once"):
        gp.devices(spec)


def _in_a_new_process(code, **environment):
    ours = ("MXNET_CPU_TEMP_COPY", "MXNET_CPU_PARALLEL_RAND_COPY", "OMP_NUM_THREADS")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    result = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


THREADS = """
import os, gluon_parallel as gp, mxnet as mx, ctypes
os.sched_getaffinity = lambda pid: set(range(6))
devices = gp.devices("cpu:{number}")
from gluon_parallel.engine import push
gomp = ctypes.CDLL("libgomp.so.1")
seen = []
for device in devices:
    push(lambda: seen.append(gomp.omp_get_max_threads()), device=device)
mx.nd.waitall()
print(os.environ.get("MXNET_CPU_TEMP_COPY"), *seen)
"""


def test_several_cpu_devices_get_buffers_and_their_share_of_the_cores():
    copies, *threads = _in_a_new_process(THREADS.format(number=2))
    assert int(copies) > 4
    assert threads == ["3", "3"]
    assert _in_a_new_process(THREADS.format(number=3))[1:] == ["2", "2", "2"]


def test_what_the_user_set_is_left_alone():
    seen = _in_a_new_process(THREADS.format(number=2), MXNET_CPU_TEMP_COPY="7", OMP_NUM_THREADS="5")
    assert seen == ["7", "5", "5"]


def test_one_cpu_device_changes_nothing():
    assert _in_a_new_process(THREADS.format(number=1))[0] == "None"
