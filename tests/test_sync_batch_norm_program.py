"""SyncBatchNorm in a long random program in which steps fail: every step that can succeed is exact, none hangs."""

import numpy as np
import pytest
from batch_norm_reference import by_operators, close, hybridized, joint, on, one_by_one, reference, shards, summed
from batch_norm_waiting import let_time_run_out

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel import nn
from gluon_parallel.errors import BarrierTimeout
from gluon_parallel.nn.sync_batch_norm.participants import drain

pytestmark = pytest.mark.arithmetic

CHANNELS, SHAPE = 3, (3, 4)
KINDS = {  # how often each comes
    "right": 0.4, "fewer devices": 0.15, "twice": 0.15, "forward only": 0.1, "a device is missing": 0.08,
    "a backward pass is missing": 0.05, "an error in the loop": 0.07,
}  # fmt: skip
# float32 around float64 sums; what is computed by MXNet's operators is float32 throughout.
TOLERANCE = 5e-6


class Program:
    """One layer on three devices, and the steps that it is taken through."""

    def __init__(self, rng, uses_operators, hybridize):
        self.rng, self.devices, self.passes = rng, gp.devices("cpu:3"), 0
        self.net = nn.SyncBatchNorm(in_channels=CHANNELS, timeout=60)
        if uses_operators:
            by_operators(self.net)
        self.net.initialize(ctx=self.devices)
        self.net.gamma.set_data(mx.nd.array(rng.uniform(0.5, 1.5, CHANNELS)))
        self.net.beta.set_data(mx.nd.array(rng.normal(size=CHANNELS)))
        self.gamma, self.beta = (p.data(self.devices[0]).asnumpy() for p in (self.net.gamma, self.net.beta))
        if hybridize is not None:
            self.net = hybridized(self.net, **hybridize)

    def batch(self, num_devices):
        sizes = self.rng.integers(1, 5, num_devices)
        return shards(self.rng, sizes, SHAPE, offset=float(self.rng.choice([0, 10]))), shards(self.rng, sizes, SHAPE)

    def running(self):
        return [[p.data(device).asnumpy() for device in self.devices]
                for p in (self.net.running_mean, self.net.running_var)]  # fmt: skip

    def compare(self, devices, x, heads, xs, ys, before):
        """Everything that a step on `devices` has computed, with one device that has the whole batch."""
        y, dx, dgamma, dbeta, mean, variance = reference(x, heads, self.gamma, self.beta)
        assert min(np.abs(array).max() for array in (dx[0], dgamma, dbeta)) > 1e-3  # zeros would not do
        close(np.concatenate([a.asnumpy() for a in ys]), np.concatenate(y), TOLERANCE, "output")
        close(np.concatenate([a.grad.asnumpy() for a in xs]), np.concatenate(dx), TOLERANCE, "input's gradient")
        if len(devices) == len(self.devices):
            close(summed(self.net.gamma), dgamma, TOLERANCE, "gamma's gradient")
            close(summed(self.net.beta), dbeta, TOLERANCE, "beta's gradient")
        for old, new, value in zip(before, self.running(), (mean, variance)):
            for copied in new:
                close(copied, 0.9 * old[0] + 0.1 * value, TOLERANCE, "running statistics")

    def right(self, devices):
        x, heads = self.batch(len(devices))
        xs, before = on(devices, x), self.running()
        loop = joint if self.rng.random() < 0.5 else one_by_one
        with nn.participants(self.net, devices):
            ys = loop(self.net, xs, on(devices, heads, grad=False))
        self.compare(devices, x, heads, xs, ys, before)
        self.passes += 2 * len(devices)

    def twice(self):
        """The layer on its own result: the devices come to it twice in either direction."""
        x, heads = self.batch(3)
        xs = on(self.devices, x)
        ys = joint(lambda a: self.net(self.net(a)), xs, on(self.devices, heads, grad=False))
        between = reference(x, heads, self.gamma, self.beta)[0]
        y, dbetween = reference(between, heads, self.gamma, self.beta)[:2]
        dx = reference(x, dbetween, self.gamma, self.beta)[1]
        close(np.concatenate([a.asnumpy() for a in ys]), np.concatenate(y), TOLERANCE, "output")
        close(np.concatenate([a.grad.asnumpy() for a in xs]), np.concatenate(dx), 4 * TOLERANCE, "gradient")
        self.passes += 12

    def forward_only(self):
        x, heads = self.batch(3)
        with mx.autograd.record():
            ys = [self.net(a) for a in on(self.devices, x)]
        close(np.concatenate([a.asnumpy() for a in ys]),
              np.concatenate(reference(x, heads, self.gamma, self.beta)[0]), TOLERANCE, "output")  # fmt: skip
        self.passes += 3

    def a_device_is_missing(self):
        xs = on(self.devices, self.batch(3)[0])
        missing = int(self.rng.integers(3))
        with mx.autograd.record():
            ys = [self.net(a) for i, a in enumerate(xs) if i != missing]
        self.time_runs_out(missing, ys[0], "forward")
        self.passes += 2

    def a_backward_pass_is_missing(self):
        xs = on(self.devices, self.batch(3)[0])
        with mx.autograd.record():
            losses = [self.net(a).square().sum() for a in xs]
        mx.nd.waitall()
        missing = int(self.rng.integers(3))
        mx.autograd.backward([loss for i, loss in enumerate(losses) if i != missing])
        self.time_runs_out(missing, xs[missing - 1].grad, "backward")
        self.passes += 5

    def time_runs_out(self, missing, array, direction):
        come = [device for i, device in enumerate(self.devices) if i != missing]
        let_time_run_out(self.net, *come)
        words = rf"{direction} .*{come[0]}, {come[1]} arrived, {self.devices[missing]} did not.*Every device must run"
        with pytest.raises(BarrierTimeout, match=words.replace("(", "[(]").replace(")", "[)]")):
            array.wait_to_read()

    def an_error_in_the_loop(self):
        some = self.devices[: int(self.rng.integers(2, 4))]
        xs = on(some, self.batch(len(some))[0])
        with pytest.raises(ArithmeticError), nn.participants(self.net, some), mx.autograd.record():
            self.net(xs[int(self.rng.integers(len(some)))])
            raise ArithmeticError("on purpose")  # nobody waits for the timeout
        self.passes += 1

    def step(self, kind):
        if kind in ("right", "fewer devices"):
            chosen = sorted(self.rng.choice(3, 3 if kind == "right" else int(self.rng.integers(1, 3)), replace=False))
            self.right([self.devices[i] for i in chosen])
        else:
            getattr(self, kind.replace(" ", "_"))()
        drain()  # the failure of a pass is raised once by each array that it should have written


@pytest.mark.parametrize("uses_operators", [False, True])
@pytest.mark.parametrize("hybridize", [None, {}, {"static_alloc": True, "static_shape": True}], ids=str)
@pytest.mark.parametrize("passes", [250, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_step_of_a_random_program_is_exact_whatever_failed_before(rng, uses_operators, hybridize, passes):
    program, kinds = Program(rng, uses_operators, hybridize), set()
    while program.passes < passes or kinds != set(KINDS):
        kind = str(rng.choice(list(KINDS), p=list(KINDS.values())))
        kinds.add(kind)
        program.step(kind)
    program.right(program.devices)
