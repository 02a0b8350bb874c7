import os
import subprocess
import sys

import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import cores


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
        (iter(["cpu:2", "cpu(5)"]), [mx.cpu(0), mx.cpu(1), mx.cpu(5)]),
    ],
)
def test_a_spec_becomes_the_devices_it_names(spec, expected):
    assert gp.devices(spec) == expected


@pytest.mark.parametrize(
    ("spec", "num", "expected"),
    [("gpu", 2, [0, 1]), ("gpu:1", 2, [0]), ("gpu@1", 2, [1]), ("gpu@1,0", 2, [1, 0]), ("auto", 2, [0, 1]),
     ("gpu:3", 2, r"gpu\(2\) in 'gpu:3' is not there.*gpu\(0\) to gpu\(1\)"),
     ("auto", 1, r"'auto' \(GLUON_PARALLEL_DEVICES=gpu:3\) is not there"),
     *((spec, 0, "no GPU") for spec in ("gpu", "gpu:2", "gpu@0", mx.gpu(0)))],
)  # fmt: skip
def test_gpus_are_found_where_there_are_some_and_otherwise_refused_by_name(monkeypatch, spec, num, expected):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: num)
    if num == 1:
        monkeypatch.setenv("GLUON_PARALLEL_DEVICES", "gpu:3")
    if isinstance(expected, list):
        assert gp.devices(spec) == [mx.gpu(number) for number in expected]
        return
    with pytest.raises(gp.errors.DeviceUnavailable, match=expected):
        gp.devices(spec)


def test_auto_without_a_gpu_is_two_cpu_devices_where_there_are_two_cores(monkeypatch):
    monkeypatch.setattr(mx.context, "num_gpus", lambda: 0)
    for affinity, devices in (({0, 1, 2}, [mx.cpu(0), mx.cpu(1)]), ({0}, [mx.cpu(0)])):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, affinity=affinity: affinity)
        assert gp.devices("auto") == devices


UNREADABLE = ["tpu", "cpu:0", "cpu:", "gpu@", "gpu@a", "cpu:2,3", "", [], 2, None, ["cpu", "cpu:2"]]
UNREADABLE += ["gpu:999999999", f"cpu:{'9' * 5000}", f"gpu({'9' * 5000})", "x" * 5000]  # and huge


@pytest.mark.parametrize("spec", UNREADABLE)
def test_what_cannot_be_read_is_refused(spec):
    with pytest.raises(gp.errors.DeviceUnavailable, match="expected|more than once|wanted a whole number"):
        gp.devices(spec)


def _in_a_new_process(code, **environment):
    ours = ("MXNET_CPU_TEMP_COPY", "MXNET_OMP_MAX_THREADS", "OMP_NUM_THREADS")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    result = subprocess.run(
        [sys.executable, "-c", code], env={**kept, **environment}, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


THREADS = """
import os
os.sched_getaffinity = lambda pid: set(range(6))  # six cores, none of them a hyper-thread
import gluon_parallel as gp, mxnet as mx, ctypes
from gluon_parallel import cores
from gluon_parallel.mxnet.engine import push
cores.physical_core, cores._cpu_limits = str, list
devices = gp.devices("cpu:{number}") if {number} else [mx.cpu(0)]
gomp = ctypes.CDLL("libgomp.so.1")
seen = []
for device in devices:
    push(lambda: seen.append(gomp.omp_get_max_threads()), device=device)
mx.nd.waitall()
print(os.environ.get("MXNET_CPU_TEMP_COPY"), *seen)
"""


@pytest.mark.parametrize(("number", "threads"), [(0, "3"), (1, "6"), (2, "3"), (4, "1")])
def test_each_cpu_device_gets_its_share_of_the_cores_and_without_a_choice_of_devices_as_mxnet_takes(number, threads):
    assert _in_a_new_process(THREADS.format(number=number)) == ["None", *[threads] * max(number, 1)]


def test_what_the_user_set_is_left_alone():
    seen = _in_a_new_process(THREADS.format(number=2), MXNET_CPU_TEMP_COPY="7", OMP_NUM_THREADS="5")
    assert seen == ["7", "5", "5"]


def test_hyper_threads_count_as_one_core(monkeypatch):
    monkeypatch.setattr(cores, "_cpu_limits", list)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 6, 7})
    monkeypatch.setattr(cores, "physical_core", lambda number: f"{number % 6},{number % 6 + 6}")
    assert cores.num_physical() == 3


@pytest.mark.parametrize(("limit", "wanted"), [(2.5, 2), (0.5, 1), (64, 8)])
def test_the_limit_of_a_container_counts(monkeypatch, limit, wanted):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "physical_core", str)
    monkeypatch.setattr(cores, "_cpu_limits", lambda: [16, limit])
    assert cores.num_physical() == cores.num_logical() == wanted


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        ("0::/box\n", {"box/cpu.max": "150000 100000\n", "cpu.max": "max 100000\n"}, [1.5]),
        ("0::/slice/box\n", {"slice/box/cpu.max": "max 100000\n", "slice/cpu.max": "50000 100000\n"}, [0.5]),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, [2.0]),
        ("4:memory:/a\n3:cpu,cpuacct:/box\n",
         {"cpu,cpuacct/box/cpu.cfs_quota_us": "50000", "cpu,cpuacct/box/cpu.cfs_period_us": "100000"}, [0.5]),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
        ("0::/\n", {"cpu.max": "nonsense\n"}, []),
        (None, {}, []),
    ],
)  # fmt: skip
def test_limits_of_control_groups_are_read(tmp_path, own, files, limits):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    listing = tmp_path / "own"
    if own is not None:
        listing.write_text(own)
    assert sorted(set(cores._cpu_limits(tmp_path, listing))) == limits


MEMORY = """
import re, sys
import gluon_parallel as gp, mxnet as mx, numpy as np
from mxnet import gluon
devices = gp.devices(sys.argv[1])
net = gluon.nn.HybridSequential()
for number in range(12):
    net.add(gluon.nn.Conv2D(32, 3, padding=1, in_channels=32 if number else 3))
    net.add(gp.nn.SyncBatchNorm(in_channels=32) if sys.argv[2] == "sync" else gluon.nn.BatchNorm(in_channels=32))
    net.add(gluon.nn.Activation("relu"))
net.add(gluon.nn.GlobalAvgPool2D(), gluon.nn.Dense(10, in_units=32))
net.initialize(mx.init.Xavier(), ctx=devices)
net.hybridize()
step = gp.DataParallel(net, gluon.loss.SoftmaxCrossEntropyLoss(), gluon.Trainer(net.collect_params(), "sgd"))
x, y = np.zeros((64, 3, 32, 32), "float32"), np.zeros(64, "float32")
for _ in range(6):
    step(x, y)
    mx.nd.waitall()
# Of this program alone: ru_maxrss is at least that of the process that started it.
print(re.search("VmHWM:(.*) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "sync"])
def test_two_devices_take_little_more_memory_than_one(kind):
    def kilobytes(spec):
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", MEMORY, spec, kind],
                              capture_output=True, text=True, timeout=1500)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    # Parameters are 0.5 MB here. It is 1.1 to 1.3 times as much, and 3 to 6 times where a thread has 512 buffers.
    assert kilobytes("cpu:2") < 2 * kilobytes("cpu")
