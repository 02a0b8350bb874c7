"""Threads in the place of processes are lost in chosen states; those that are left end with what one alone would."""

import numpy as np
import pytest
from threads_that_are_lost import World

from gluon_parallel.kvstore.collective import gather
from gluon_parallel.survive.survival import Survival
from gluon_parallel.training.checkpoint import restore, state
from gluon_parallel.training.prepare.loaders import shard_loader
from mxnet import autograd, gluon

NUM_SAMPLES, BATCH, EPOCHS = 22, 6, 2  # four batches each, of which the last one has 4 samples
CLOSE = {"rtol": 1e-9, "atol": 1e-12}  # float64 sums in another order


class Net(gluon.Block):
    """A linear layer that counts its passes, as batch norm changes running statistics."""

    def __init__(self):
        super().__init__()
        self.layer = gluon.nn.Dense(1, in_units=3, use_bias=False, dtype="float64", weight_initializer="ones")
        count = {"shape": (1,), "init": "zeros", "grad_req": "null", "differentiable": False, "dtype": "float64"}
        self.count = self.params.get("count", **count)

    def forward(self, x):
        self.count.set_data(self.count.data() + 1)
        return self.layer(x)


class Training:
    """Steps of a linear regression whose noise follows from the step; every `accumulate`-th one updates.

    Args:
        losses: {(moment, step): the thread that is lost there}.
    """

    def __init__(self, store, losses=(), accumulate=1):
        self.store, self.losses, self.accumulate = store, dict(losses), accumulate
        self.accumulated, self.ranks = 0, store.ranks  # steps, by these processes
        self.net = Net()
        self.net.initialize()
        self.weight = self.net.layer.weight
        self.weight.grad_req = "add"
        self.trainer = gluon.Trainer(self.net.collect_params(), "sgd", {"learning_rate": 0.01, "momentum": 0.9})
        rng = np.random.default_rng(3)
        x, y = rng.normal(size=(NUM_SAMPLES, 3)), rng.normal(size=(NUM_SAMPLES, 1))
        loader = gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), BATCH, shuffle=True)
        tests = gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), BATCH)
        self.train, self.test = (shard_loader(each, store.rank, store.num_workers, 5) for each in (loader, tests))
        self.survival = Survival(
            self.step, self.net, self.trainer, [self.train, self.test], store, state, restore, self.reseed
        )
        self.told = []

    def reseed(self, number):
        self.rng = np.random.default_rng(number)

    def lose(self, moment):
        if self.losses.get((moment, self.survival.num_steps)) == self.store.number:
            self.store.lose()

    def step(self, x, y):
        weight = self.weight
        self.accumulated = self.accumulated % self.accumulate if self.ranks is self.store.ranks else 0
        self.accumulated, self.ranks = self.accumulated + 1, self.store.ranks
        with autograd.record():
            loss = ((self.net(x) - y * self.rng.normal()) ** 2).sum()
        loss.backward()
        if self.accumulated < self.accumulate:
            return 0.0
        self.lose("before the sum")
        if ("behind", self.survival.num_steps) in self.losses:
            gather(self.store, "a step", np.zeros(1))
        own = np.append(weight.grad().asnumpy().ravel(), loss.asscalar())
        total = gather(self.store, "a step", own).sum(axis=0)
        if len(self.store.ranks) == 3 and ("behind", self.survival.num_steps) in self.losses:
            if self.store.number == 2:  # once process 0 has updated
                self.store.wait_for(lambda: self.store.world.has_updated)
                self.store.lose()
            elif self.store.number == 1:
                self.store.wait_for(lambda: 2 in self.store.world.lost)
        self.survival.commit([weight])
        weight.grad()[:] = total[:-1].reshape(weight.shape)
        self.trainer.update(1, ignore_stale_grad=True)
        weight.zero_grad()
        if self.store.number == 0 and ("behind", self.survival.num_steps) in self.losses:
            with self.store.world.condition:
                self.store.world.has_updated = True
                self.store.world.condition.notify_all()
        return total[-1]

    def evaluate(self):
        own = np.zeros(2)
        for number, (x, y) in enumerate(self.test):
            if number == 2:
                self.lose("within an evaluation")
            own += [x.shape[0], ((self.net.layer(x) - y) ** 2).sum().asscalar()]
        return gather(self.store, "an evaluation", own).sum(axis=0).tolist()

    def run(self):
        """Train, but for one batch, and evaluate now and then."""
        left_out = False
        for _ in range(EPOCHS):
            for batch in self.train:
                if self.survival.num_steps == 5 and not left_out:
                    left_out = True
                    self.told += self.survival.together(self.evaluate)
                    continue
                self.reseed(self.survival.num_steps)
                self.told.append(self.survival(*batch))
                if self.survival.num_steps % 4 == 2:
                    self.lose("outside of a step")
                    self.told += self.survival.together(self.evaluate)
        return {
            "weight": self.weight.data().asnumpy(), "count": self.net.count.data().asnumpy(), "told": self.told,
            "updates": self.survival.num_updates, "processes": self.store.num_workers,
        }  # fmt: skip


CASES = {  # losses, steps of an update
    "two at once": ({("before the sum", 3): 1, ("before the sum", 5): 0}, 1),
    "the first step": ({("before the sum", 0): 0}, 1),
    "accumulated": ({("before the sum", 5): 2}, 2),
    "an evaluation": ({("within an evaluation", 6): 0}, 1),
    "an evaluation, accumulated": ({("within an evaluation", 2): 1}, 4),
    "a batch is left out": ({("within an evaluation", 5): 2}, 2),
    "outside": ({("outside of a step", 2): 0}, 1),
    "one is behind": ({("behind", 4): 2}, 1),
    "one is behind, accumulated": ({("behind", 5): 2}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_those_that_are_left_end_with_what_one_alone_would(monkeypatch, case):
    losses, accumulate = CASES[case]
    [alone] = World(1).run(lambda store: Training(store, {}, accumulate).run()).values()
    monkeypatch.setenv("GLUON_PARALLEL_MIN_PROCESSES", "1")
    world = World(3)
    world.has_updated = False
    found = world.run(lambda store: Training(store, losses, accumulate).run())
    assert len(found) == 3 - len(losses) == [*found.values()][0]["processes"]
    for one in found.values():
        for name in ("weight", "count", "told", "updates"):
            np.testing.assert_allclose(one[name], alone[name], **CLOSE, err_msg=name)
