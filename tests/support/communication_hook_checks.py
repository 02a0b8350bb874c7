"""Checks of communication hooks between processes: built-in ones against NumPy, training, checkpoints, refusals."""

import re
from pathlib import Path

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.archive import Archive
from gluon_parallel.communication_hooks import BucketStore, GradientBucket, PowerSGD, float16, two_bits
from gluon_parallel.communication_hooks.hook import HOOKS
from gluon_parallel.training.checkpoint.hook_state import restore_hook, state_of_hook
from mxnet import gluon, nd
from mxnet.contrib.amp.loss_scaler import LossScaler

DEVICES = gp.devices("cpu:2")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "communication_hooks.md"
SHAPES = (6, 5, 3, 3), (9,), (12, 20), (3, 2)  # the second and the last one are not worth two factors


def identity(bucket, store):
    """What every hook may be compared with."""
    return [store.allreduce(gradient) for gradient in bucket.gradients]


class Trained:
    """A net of convolutions in training, with uneven shards; the last process has no samples in every third step."""

    def __init__(self, store, hook=None, optimizer="sgd", compression_params=None, load=None, **options):
        self.store = store
        self.steps = 0
        self.net = gluon.nn.HybridSequential()
        self.net.add(gluon.nn.Conv2D(8, 3, in_channels=3), gluon.nn.Activation("tanh"))
        self.net.add(gp.nn.SyncBatchNorm(in_channels=8, kvstore=store), gluon.nn.Conv2D(6, 3, in_channels=8))
        self.net.add(gluon.nn.Dense(20, in_units=24, activation="tanh"), gluon.nn.Dense(3, in_units=20))
        self.net[3].bias.grad_req = "null"
        self.net.initialize(ctx=DEVICES)
        rng = np.random.default_rng(5)
        for name, parameter in self.net._collect_params_with_prefix().items():
            if name.endswith("weight"):
                parameter.set_data(nd.array(rng.normal(size=parameter.shape) / np.sqrt(parameter.shape[1])))
        self.net.hybridize()
        self.trainer = gluon.Trainer(
            self.net.collect_params(), optimizer, {"learning_rate": 0.05}, kvstore=store,
            update_on_kvstore=False, compression_params=compression_params,
        )  # fmt: skip
        if load is not None:
            gp.checkpoint.load(load, self.net, self.trainer)
        self.step = gp.DataParallel(
            self.net, lambda y, label, factor: gluon.loss.SoftmaxCrossEntropyLoss()(y, label) * factor, self.trainer,
            communication_hook=hook, **options,
        )  # fmt: skip

    def run(self, num, factor=1.0):
        """So many more steps; every sample's loss is multiplied by `factor`."""
        rank, num_workers = self.store.rank, self.store.num_workers
        for _ in range(num):
            self.steps += 1
            sizes = [2 + 3 * ((self.steps + one) % 2) for one in range(num_workers)]
            sizes[-1] *= self.steps % 3 > 0
            rng = np.random.default_rng(self.steps)
            x, y = rng.normal(size=(sum(sizes), 3, 6, 6)), rng.integers(0, 3, sum(sizes))
            mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            labels = nd.array(y[mine]), nd.full(sizes[rank], factor)
            self.step(*((nd.array(x[mine]), labels) if sizes[rank] else (None,)))
        self.step.update()
        return self

    def weights(self):
        """All of them, which are alike on all devices and processes."""
        gp.check_replicas(self.net, self.store)
        return np.concatenate(
            [one.data(DEVICES[0]).asnumpy().ravel() for one in self.net.collect_params().values()]
        )  # fmt: skip


def check_an_identity_hook_is_the_plain_step_bit_for_bit(store):
    for options in ({"accumulate": 2, "clip_global_norm": 0.1}, {"ignore_stale_grad": True}):
        plain, hooked = (Trained(store, hook, **options).run(4).weights() for hook in (None, identity))
        np.testing.assert_array_equal(hooked, plain)


def check_built_in_hooks_train_alike_everywhere_and_otherwise_than_the_plain_step(store):
    plain = Trained(store, optimizer="adam").run(7).weights()
    for hook in (PowerSGD(rank=2), PowerSGD(rank=1), two_bits(0.02)):
        weights = Trained(store, hook, optimizer="adam").run(7).weights()
        assert 0 < np.abs(weights - plain).max() < 0.8  # Adam changes a weight by 0.05 per step


def check_a_sharded_optimizer_takes_the_sums_of_hooks(store):
    whole, sharded = (
        Trained(store, PowerSGD(rank=2), optimizer="adam", shard_optimizer=is_sharded).run(4).weights()
        for is_sharded in (False, True)
    )
    np.testing.assert_array_equal(sharded, whole)


def check_the_hook_of_the_page_trains_as_it_says(store):
    names: dict = {}
    _, program = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    exec(program, names)
    plain, hooked = (Trained(store, hook).run(6).weights() for hook in (None, names["communication_hook"]))
    assert 0 < np.abs(hooked - plain).max() < 0.02 * np.abs(plain).max()  # 1 / 254 of the largest value per update


def check_hooks_of_the_store_are_its_compression(store):
    """The argument of DataParallel and that of the trainer are one mechanism."""
    for hook in (float16, two_bits(0.02)):
        ours = Trained(store, hook).run(4).weights()
        theirs = Trained(store, compression_params=hook.compression_params).run(4).weights()
        np.testing.assert_array_equal(ours, theirs)
        # Between hosts, such small arrays are not rounded to 16 bits.
        assert hook is float16 or (ours != Trained(store).run(4).weights()).any()


def check_a_hook_compresses_only_for_the_trainer_that_asked_for_it(store):
    """Trainings in turns over one store, whose keys are the same, and each alone over a store of its own."""
    hooks = None, two_bits(0.02), float16, two_bits(0.02), None
    together = [Trained(store, hook) for hook in hooks]
    for _ in range(4):
        for training in together:
            training.run(1)
    alone = [Trained(gp.kvstore.create(store.type), hook).run(4).weights() for hook in hooks]
    for hook, training, wanted in zip(hooks, together, alone):
        np.testing.assert_array_equal(training.weights(), wanted, err_msg=repr(hook))
    training = together[1]  # another DataParallel of this trainer asks for nothing
    assert any(residual.any() for residual in store.residuals(training.trainer).values())
    training.step = gp.DataParallel(training.net, gluon.loss.L2Loss(), training.trainer)
    assert training.trainer._compression_params is None and not store.residuals(training.trainer)


def check_a_module_compresses_its_own_gradients_alone(store):
    """Over a store whose other users did not ask for it."""

    def trained(name, compression_params=None):
        data, label = mx.sym.var("data"), mx.sym.var("softmax_label")
        net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(data, num_hidden=3, name=name), label)
        module = mx.mod.Module(net, context=DEVICES, compression_params=compression_params)
        module.bind([("data", (4, 5))], [("softmax_label", (4,))])
        module.init_params(mx.init.One())
        module.init_optimizer(store, "sgd", {"learning_rate": 0.1})
        rng = np.random.default_rng(store.rank)
        batch = nd.array(rng.normal(size=(4, 5))), nd.array(rng.integers(0, 3, 4))
        for _ in range(2):
            module.forward_backward(mx.io.DataBatch([batch[0]], [batch[1]]))
            module.update()
        return module.get_params()[0][f"{name}_weight"].asnumpy()

    before = trained("first")  # a store keeps a name's weights once
    compressed, after = trained("second", {"type": "2bit", "threshold": 0.05}), trained("third")
    assert (compressed != before).any()
    np.testing.assert_array_equal(after, before)


def buckets(store, dtype, divisors=(64.0, 64.0, 16.0, 64.0)):
    """(the bucket of this process, the gradients of all processes) for some updates."""
    for update, divisor in enumerate(divisors):
        every = [
            [np.random.default_rng([update, rank, number]).normal(size=shape).astype(dtype) * divisor
             for number, shape in enumerate(SHAPES)]
            for rank in range(store.num_workers)
        ]  # fmt: skip
        own = [nd.array(gradient, dtype=dtype) for gradient in every[store.rank]]
        numbers = list(range(len(SHAPES)))
        yield GradientBucket(numbers, list(map(str, numbers)), own, divisor, update), every


def power_sgd(matrix, error, basis, divisor):
    """(what is applied, what is left out, the next basis) for the sum over the processes; (n, m), (n, m), (m, rank)."""
    corrected = matrix + divisor * error
    p, _ = np.linalg.qr(corrected @ basis)
    q = corrected.T @ p
    return p @ q.T, (corrected - p @ q.T) / divisor, np.linalg.qr(q)[0]


def check_power_sgd_is_that_of_numpy(store):
    """With error feedback and warm start, for convolutions too, and batches of several sizes."""
    hook, known = PowerSGD(rank=2, start_step=1), {}
    for bucket, every in buckets(store, "float64"):
        sums = hook(bucket, BucketStore(store, "power sgd"))
        for number in range(len(SHAPES)):
            exact, got = sum(own[number] for own in every), sums[number].asnumpy()
            if number in (1, 3) or bucket.num_updates == 0:
                np.testing.assert_allclose(got, exact, rtol=1e-12)
                continue
            # The sum of all processes' matrices behaves as one: P and Q are linear in them.
            n, m = (18, 15) if number == 0 else (12, 20)
            matrix = exact.transpose(0, 2, 1, 3).reshape(n, m) if number == 0 else exact
            if number not in known:
                first = np.random.default_rng([0, number, bucket.num_updates]).random((2, m)) - 0.5
                known[number] = np.zeros((n, m)), np.linalg.qr(first.T)[0]
            error, basis = known[number]
            applied, *known[number] = power_sgd(matrix, error, basis, bucket.divisor)
            wanted = applied.reshape(6, 3, 5, 3).transpose(0, 2, 1, 3) if number == 0 else applied
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9 * bucket.divisor)  # sums in another order
            total = gp.metrics.gather_rows(hook.errors[number].asnumpy().reshape(1, -1), store).sum(axis=0)
            np.testing.assert_allclose(total, known[number][0].ravel(), atol=1e-9)


def check_a_resumed_run_is_the_same_bit_for_bit(store, tmp_path):
    folder = Path(gp.broadcast_object(str(tmp_path), store))
    for make in (lambda: PowerSGD(rank=2), lambda: two_bits(0.02)):
        whole = Trained(store, make()).run(3)
        path = gp.checkpoint.save(folder / "checkpoint.npz", whole.net, whole.trainer)
        whole.run(3)
        for loads_first in (True, False):
            again = Trained(store, make(), load=path if loads_first else None)
            if not loads_first:
                gp.checkpoint.load(path, again.net, again.trainer)
            again.steps = 3
            np.testing.assert_array_equal(again.run(3).weights(), whole.weights())
        forgetful = Trained(store, make(), load=path)
        restore_hook(Archive({}, {}), forgetful.trainer, [])
        forgetful.steps = 3
        assert (forgetful.run(3).weights() != whole.weights()).any()


def check_more_or_fewer_processes_divide_what_was_left_out(store):
    run = Trained(store, PowerSGD(rank=2)).run(2)
    names = [parameter.name for parameter in run.trainer._params]
    saved = state_of_hook(run.trainer, names)
    before = {number: array.asnumpy() for number, array in HOOKS.of(run.trainer).errors.items()}
    assert before
    for change in (lambda rows: np.concatenate([rows, rows[:1]]), lambda rows: rows[:-1].copy()):
        others = {name: change(rows) if "/errors/" in name else rows for name, rows in saved.items()}
        restore_hook(Archive(others, {}), run.trainer, names)
        for number, array in HOOKS.of(run.trainer).errors.items():
            rows = others[f"hook/errors/{names[number]}"]
            wanted = rows.sum(axis=0, dtype=np.float64) / store.num_workers
            np.testing.assert_allclose(array.asnumpy(), wanted, rtol=1e-6, atol=1e-9)
    restore_hook(Archive(saved, {}), run.trainer, names)
    for number, array in HOOKS.of(run.trainer).errors.items():
        np.testing.assert_array_equal(array.asnumpy(), before[number])


def check_an_update_that_is_left_out_leaves_the_hook_as_it_was(store):
    """Under loss scaling, an overflow must not stay in what error feedback adds; the scale is no part of it."""
    runs = []
    for overflows in (False, True):
        hook, run = PowerSGD(rank=2), Trained(store)
        run.trainer._amp_loss_scaler, run.trainer._amp_original_scale = LossScaler(), run.trainer._scale
        run.step = gp.DataParallel(run.net, run.step.loss, run.trainer, communication_hook=hook)
        run.run(2)
        if overflows:
            before, steps = dict(hook.errors), run.steps
            run.run(1, factor=1e38)
            assert run.step.loss_scaling.num_skipped == 1
            assert hook.errors == before
            run.steps = steps
        runs.append(run.run(2))
    undisturbed, disturbed = (run.weights() for run in runs)
    assert np.isfinite(disturbed).all()
    # Half the scale, a power of two: the same numbers but for the running statistics of the step left out.
    trained = [
        one.grad_req != "null"
        for one in runs[0].net.collect_params().values()
        for _ in range(one.data(DEVICES[0]).size)
    ]
    np.testing.assert_array_equal(disturbed[trained], undisturbed[trained])


def check_wrong_combinations_are_refused(store):
    for hook in (identity, PowerSGD()):
        with pytest.raises(ValueError, match=r"compression_params=.*use one of them"):
            Trained(store, hook, compression_params={"type": "fp16"})
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="--min-processes"):
            patch.setenv("GLUON_PARALLEL_MIN_PROCESSES", "1")
            run = Trained(store, hook)
            gp.survive(run.step, run.net, run.trainer)
    hook = PowerSGD()
    Trained(store, hook)
    with pytest.raises(ValueError, match=r"PowerSGD\(rank=4, start_step=0\) belongs to another trainer"):
        Trained(store, hook)
    for wrong in (
        lambda bucket, store: None,
        lambda bucket, store: [],
        lambda bucket, store: list(map(mx.nd.sum, bucket.gradients)),
    ):
        with pytest.raises(gp.errors.ArrayMismatch, match="communication_hook"):
            Trained(store, wrong).run(1)
