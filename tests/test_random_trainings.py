"""Random trainings, in all ways over devices and processes, against a plain loop on one device."""

import time

import pytest
import trainings_compare
import trainings_draw
from processes import needs_mpi, run_servers
from trainings_case import Case, Step
from trainings_pool import WORKER, Pool, together

# Many seconds of them; scripts/studies/random_trainings.py runs as many as one likes.
SEEDS, OF_TWO = range(2204, 2254), range(2204, 2216)


def compare(seed, run, processes):
    """Fail with the smallest training that differs from one device, of those like that of this seed in a minute."""
    known, end = {}, float("inf")

    def check(case):
        nonlocal end
        if str(case) not in known:
            known[str(case)] = run(case) if time.monotonic() < end else ("equal", "")
        kind, text = known[str(case)]
        if kind not in ("equal", "refused"):
            end = min(end, time.monotonic() + 60)
            raise AssertionError(f"{kind}: {case}\n{text}")

    trainings_draw.examine(seed, check, processes=(processes,))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_training_has_the_weights_of_one_device(seed):
    compare(seed, trainings_compare.run, 1)


@needs_mpi
def test_random_trainings_of_two_processes_have_the_weights_of_one_device():
    with Pool() as pool:
        for seed in OF_TWO:
            compare(seed, pool.run, 2)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"sums": "step"}, marks=pytest.mark.slow),
        pytest.param({"sums": "allreduce_grads", "update_on_kvstore": False, "deferred": True}, marks=pytest.mark.slow),
        {"way": "DataParallel", "batch_norm": True, "numpy_mode": True, "net": "conv"},
    ],
)
def test_a_training_over_mxnets_servers_has_the_weights_of_one_device(options):
    """By processes of its own, for the servers' keys keep their shapes; of 4 samples, for they divide by one number."""
    steps = tuple(Step(sizes) for sizes in ((3, 1), (1, 3), (2, 2)))
    options = {"way": "loop", "optimizer": "momentum", "wd": 0.01, "dtype": "float32", **options}
    case = Case(processes=2, devices=2, store="dist_sync", steps=steps, **options)
    status, output = run_servers(2, WORKER, str(case))
    assert status == 0 and output.count("equal") == 2, output


def test_a_pass_that_no_step_uses_is_drawn_only_where_the_step_would_not_use_it():
    """In a loop of one's own, it is the last pass of a process without samples, so the step uses it."""
    case = {"batch_norm": False, "processes": 2, "fixed": "", "schedule": ""}
    found = [
        trainings_draw.fits("unused", {**case, "way": way}, sizes)
        for way, sizes in [("loop", (3, 1)), ("loop", (3, 0)), ("DataParallel", (3, 0))]
    ]
    assert found == [True, False, True]


def test_a_case_is_read_from_what_it_is_printed_as():
    case = Case(way="loop", clip_gradient=0.5, steps=(Step((3, 1), (0,), "freeze"),))
    assert Case.read(str(case)) == case and Case.read("{}") == Case()


def test_the_outcome_of_a_group_is_that_of_the_process_that_has_the_reason():
    assert together([["equal", ""], ["different", "weight"]]) == ("different", "process 1: weight")
    assert together([["waited", "for 1"], ["refused", "no"]]) == ("refused", "process 1: no")
    assert together([["waited", "for 1"], ["waited", "for 0"]])[0] == "failed"
