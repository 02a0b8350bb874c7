"""What gp.prepare hands out of a loader: its batches as they are, and each process's samples of them."""

from typing import Any, NamedTuple

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.split import map_arrays
from gluon_parallel.survive.steps import arguments_of, record_step
from gluon_parallel.training.prepare.empty import without_samples
from gluon_parallel.training.prepare.loaders import shard_loader
from mxnet import gluon, nd

NUM = 7


def stacked(samples, axis=0):
    return nd.array(np.stack(samples, axis))


class Named(NamedTuple):
    x: Any
    y: Any


# Functions of samples (number, vector of three, image of 2 + number rows), whose batches differ in kind
BATCHIFY = {
    "time-major": lambda samples: [stacked([vector for _, vector, _ in samples], axis=1)],
    "one array per batch": lambda samples: (stacked([number for number, *_ in samples]), nd.arange(8).reshape((4, 2))),
    "lists": lambda samples: ([nd.array(image) for *_, image in samples], [nd.array([one[0]]) for one in samples]),
    "nested": lambda samples: {"x": Named(stacked([one[1] for one in samples]), [one[0] for one in samples]), "n": 5},
    "NumPy": lambda samples: (np.stack([one[1] for one in samples]), np.array([one[0] for one in samples])),
    "mx.np": lambda samples: mx.np.array([one[0] for one in samples]),
}
SAMPLES = [(float(n), np.arange(3.0) + n, np.full((2 + n, 2), float(n))) for n in range(NUM)]


class Batchify:
    """A function of `BATCHIFY` that workers can be sent."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, samples):
        return BATCHIFY[self.kind](samples)


def loader(kind, samples=SAMPLES, **options):
    return gluon.data.DataLoader(samples, 4, batchify_fn=Batchify(kind), **options)


def plain(data):
    """A batch in lists and words that can be compared."""
    if isinstance(data, (tuple, list)):
        return [type(data).__name__, *map(plain, data)]
    if isinstance(data, dict):
        return {key: plain(value) for key, value in data.items()}
    return [type(data).__name__, data.asnumpy().tolist()] if isinstance(data, nd.NDArray) else repr(data)


@pytest.mark.parametrize("kind", BATCHIFY)
def test_batches_are_those_that_the_loader_makes_of_a_processs_samples(kind):
    whole = [plain(batch) for batch in loader(kind)]
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    _, alone = gp.prepare(net, gluon.loss.L2Loss(), gluon.Trainer(net.collect_params(), "sgd"), loader(kind))
    assert [plain(batch) for batch in alone] == whole
    for num_workers, sizes in ((2, ([2, 1], [2, 2])), (3, ([1, 1], [1, 1], [2, 1]))):
        for rank, (first, second) in enumerate(sizes):
            begin = sum(sizes[other][0] for other in range(rank)), 4 + sum(sizes[other][1] for other in range(rank))
            mine = [SAMPLES[begin[0] : begin[0] + first], SAMPLES[begin[1] : begin[1] + second]]
            part = shard_loader(loader(kind), rank, num_workers, seed=0)
            assert [plain(batch) for batch in part] == [plain(BATCHIFY[kind](samples)) for samples in mine]


@pytest.mark.parametrize("num_workers", [0, 1])  # those of the DataLoader, whose arrays are in shared memory
def test_a_part_without_samples_is_empty_in_the_classes_of_the_others(num_workers):
    def read(kind, batch_axis=0):
        workers = 0 if kind == "mx.np" else num_workers  # of which MXNet's workers warn
        data = loader(kind, SAMPLES[:1], num_workers=workers)
        [batch] = shard_loader(data, 0, 2, seed=0, batch_axis=batch_axis)  # process 1 has the sample
        return batch

    [x] = read("time-major", batch_axis=1)
    for made in (x, x.as_in_context(mx.cpu(1)), (x.astype("float32") / 255 - 1).copy()):
        assert isinstance(made, nd.NDArray) and made.shape == (3, 0) and made.asnumpy().shape == (3, 0)
    assert x.transpose().shape == (0, 3) and x[1].shape == (0,) and x.as_in_context(mx.cpu(1)).context == mx.cpu(1)
    assert read("lists") == ([], [])
    nested = read("nested")
    assert type(nested["x"]) is Named and nested["x"].x.shape == (0, 3) and nested["x"].y == [] and nested["n"] == 5
    x, y = read("NumPy")
    assert type(x) is type(y) is np.ndarray and x.shape == (0, 3) and y.shape == (0,)
    empty = read("mx.np")
    assert type(empty) is mx.np.ndarray and empty.shape == (0,)
    with pytest.raises(
        gp.errors.BatchMismatch, match=r"batch\[0\] has the shape \(3, 1\): no axis 0 of size 1.*batch_a"
    ):
        read("time-major")
    with pytest.raises(gp.errors.BatchMismatch, match=r"batch\[1\] has the shape \(4, 2\): .*leave this array out of"):
        read("one array per batch")


# What scripts do with a batch before a step
CHANGES = {
    "flat": lambda x: x.reshape((0, -1)),
    "joined": lambda x: x.reshape((-3, 0)),
    "rows": lambda x: x.reshape(-1, 4),
    "reversed": lambda x: x.reshape((-1, 0), reverse=True),
    "time-major": lambda x: x.transpose((1, 0, 2)).reshape((0, -1, 2)),
    "parts": lambda x: x.split(2, axis=1)[1],
    "steps": lambda x: x.slice_axis(1, 1, 3)[:, :, 0],
    "reduced": lambda x: x.mean(axis=1) - x.max(axis=1) / x.norm(axis=1),
    "numbers": lambda x: 2 ** (1 - abs(-x) / 255) % 3,
    "where": lambda x: (x > 0) * (x != 3) + (x <= 5),
    "kind": lambda x: x.astype("int32"),
    "labels": lambda x: x.argmax(axis=1).one_hot(5),
    "filled": lambda x: x.zeros_like() + x.flip(axis=1).tile((1, 2, 1)).square()[:, :4],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_part_without_samples_can_be_changed_as_others_can(change):
    def changed(num):
        x = nd.ones((1, 4, 2))
        x = x if num else without_samples((x,), 0)[0]
        found = CHANGES[change](x)
        for _ in range(2):  # in place
            found += 1
            found *= 2
        assert isinstance(found, nd.NDArray) and found.asnumpy().shape == found.shape
        return found

    some, none = changed(1), changed(0)
    assert none.size == 0 and none.dtype == some.dtype and len(none.shape) == len(some.shape)
    assert all(size in (other, 0) or size * other == 0 for size, other in zip(none.shape, some.shape))


def test_lists_of_anything_but_gluons_lists_of_arrays_are_empty_without_samples():
    one = nd.ones((1, 2))
    batch = [one, [one], [(one, one)], [3.0], ["word"], [["w", "x"]], [[one, one]], [{"a": 1}], 5]
    image, *lists, of_gluon, dicts, number = without_samples(batch, 0)
    assert image.shape == (0, 2) and lists == [[]] * 5 and dicts == [] and number == 5
    assert [[array.shape for array in arrays] for arrays in of_gluon] == [[(0, 2), (0, 2)]]


def test_every_wrapper_of_loaders_knows_the_axis_of_a_part_without_samples():
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    for made in (
        gp.prepare(net, gluon.loss.L2Loss(), trainer, loader("time-major"), batch_axis=1)[1],
        gp.Loop(loader("time-major"), batch_axis=1).loaders[0],
        gp.survive(lambda x: None, net, trainer, loader("time-major"), batch_axis=1)[1],
    ):
        made.divide(0, 5)  # as after a loss; process 0 has none of four samples
        assert [x.shape for [x] in made] == [(3, 0), (3, 0)]


def test_an_iterator_of_mxnet_begins_anew_with_each_pass():
    x, y = np.arange(7, dtype="float32").reshape(7, 1), np.zeros(7, "float32")
    data = mx.io.NDArrayIter(x, y, 3, last_batch_handle="discard")
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize()
    training, train = gp.prepare(net, gluon.loss.L2Loss(), gluon.Trainer(net.collect_params(), "sgd"), data)
    seen = []
    for _ in training.epochs(3):
        for batch in train:
            training.step(batch.data[0], batch.label[0])
            seen += batch.data[0].asnumpy().ravel().tolist()
            if len(seen) == 9:
                break  # in the second pass
    assert seen == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_sampler_that_begins_behind_the_first_sample_is_divided_from_there(num_workers):
    data = gluon.data.SimpleDataset(list(range(10)))

    def read(rank):
        loader = gluon.data.DataLoader(data, 4, sampler=gluon.data.SequentialSampler(5, start=3))
        return [batch.asnumpy().tolist() for batch in shard_loader(loader, rank, num_workers, seed=0)]

    batches = [sum(parts, []) for parts in zip(*map(read, range(num_workers)))]
    assert batches == [[3, 4, 5, 6], [7]]


def test_a_loader_that_is_handed_over_twice_is_read_in_two_orders_of_its_own():
    data = gluon.data.SimpleDataset(list(range(6)))

    def orders(part, num):
        return [[batch.asnumpy().tolist() for batch in part] for _ in range(num)]

    wanted = orders(shard_loader(gluon.data.DataLoader(data, 2, shuffle=True), 0, 1, seed=0), 3)
    twice = gluon.data.DataLoader(data, 2, shuffle=True)
    first, second = (shard_loader(twice, 0, 1, seed=0) for _ in range(2))
    assert orders(first, 1) + orders(second, 2) + orders(first, 2) == [*wanted[:1], *wanted[:2], *wanted[1:]]


def test_a_data_set_in_the_place_of_a_loader_is_refused():
    with pytest.raises(TypeError, match=r"a loader is the data set SimpleDataset; write gluon.data.DataLoader\(data,"):
        shard_loader(gluon.data.SimpleDataset([1, 2]), 0, 1, seed=0)


class SplitSampler(gluon.data.Sampler):
    """The samples of one process in any order, as many scripts have it."""

    def __init__(self, length, num_parts, part):
        self.numbers = np.random.RandomState(0).permutation(np.arange(length // num_parts)) + length // num_parts * part

    def __iter__(self):
        return iter(self.numbers)

    def __len__(self):
        return len(self.numbers)


def test_a_data_set_that_is_a_processs_part_already_is_told_and_others_are_not(caplog):
    data = gluon.data.SimpleDataset(list(range(11)))
    strided = gluon.data.FilterSampler(lambda number: number % 3 == 1, data)
    for part, words in (
        (data.shard(3, 1), True),
        (data.shard(3, 1).transform(lambda x: x + 1), True),
        (data.transform(lambda x: x + 1).shard(3, 1).take(4), True),
        (data.sample(SplitSampler(11, 3, 1)), True),
        (data.sample(strided), True),
        (data.take(4), False),
        (data.shard(2, 1), False),
        (data.filter(lambda number: number < 9), False),
        (data, False),
    ):
        caplog.clear()
        shard_loader(gluon.data.DataLoader(part, 2), 1, 3, seed=0)
        assert ("process 1 of 3 looks like its part of a larger one" in caplog.text) == words, part
        caplog.clear()
        shard_loader(gluon.data.DataLoader(part, 2), 0, 1, seed=0)
        assert not caplog.records
    with pytest.raises(TypeError, match="cannot divide a DataLoader with a SplitSampler of its own among 3"):
        shard_loader(gluon.data.DataLoader(data, 2, sampler=SplitSampler(11, 3, 1)), 1, 3, seed=0)


@pytest.mark.parametrize("num_steps", [5, 4])  # of an epoch, whose updates are of 3 and of the rest; 4: it breaks off
def test_what_an_epoch_scores_and_predicts_is_what_its_best_checkpoint_holds(num_steps, tmp_path, rng):
    x, y = nd.array(rng.standard_normal((10, 2))), nd.array(rng.standard_normal((10, 1)))
    net = gluon.nn.Dense(1, in_units=2)
    net.initialize(mx.init.Xavier(), ctx=[mx.cpu(0), mx.cpu(1)])
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    average, run = gp.ExponentialMovingAverage(net, trainer, decay=0.5), gp.Run(tmp_path)
    loaders = [gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), size) for size in (2, 5)]
    training, train, test = gp.prepare(
        net, gluon.loss.L2Loss(), trainer, *loaders, accumulate=3, run=run, saved={"average": average}
    )
    for epoch in training.epochs(2):
        for inputs, labels in train:
            training.step(inputs, labels)
            average.update()
            if training.step_in_epoch == 2:  # in the middle of a pass an evaluation changes nothing
                training.evaluate(test, "mse")
                assert trainer.optimizer.num_update == 2 * epoch
            if training.step_in_epoch == num_steps == 4:
                break
        if num_steps == 5:
            with average.applied():
                training.evaluate(test, "mse")
        [(_, scored)] = training.evaluate(test, "mse")
        predicted = training.predict(test)
        average.update()
        assert trainer.optimizer.num_update == average.num_updates == 2 * (epoch + 1)
        training.end_epoch(score=epoch)
    best = gluon.nn.Dense(1, in_units=2)
    best.initialize()
    gp.checkpoint.load(run.folder / "best.npz", best)
    outputs = best(x).asnumpy()  # float32, in other batches
    np.testing.assert_allclose(outputs, predicted, rtol=1e-6, atol=1e-6)
    assert ((outputs - y.asnumpy()) ** 2).mean() == pytest.approx(scored, rel=1e-5)


def test_steps_without_a_loader_are_updated_with_before_they_are_measured():
    net = gluon.nn.Dense(1, in_units=1)
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    training = gp.prepare(net, gluon.loss.L2Loss(), trainer, accumulate=3)
    data = [(nd.ones((1, 1)), nd.ones(1))]
    measures = training.update, lambda: training.evaluate(data, "mse"), lambda: training.predict(data)
    for number, measure in enumerate((*measures, training.end_epoch), 1):
        training.step(nd.ones((2, 1)), nd.ones((2, 1)))
        measure()
        assert trainer.optimizer.num_update == number


@pytest.mark.parametrize("measure", ["evaluate", "predict"])
def test_measuring_with_the_loader_of_training_in_the_middle_of_a_pass_changes_nothing(measure, rng):
    x, y = rng.standard_normal((10, 2)).astype("float32"), rng.standard_normal((10, 1)).astype("float32")

    def train(measures):
        net = gluon.nn.Dense(1, in_units=2)
        net.initialize(mx.init.One())
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        loader = gluon.data.DataLoader(gluon.data.ArrayDataset(x, y), 2, shuffle=True)
        training, train = gp.prepare(net, gluon.loss.L2Loss(), trainer, loader, accumulate=2)
        positions = []
        for _ in training.epochs(2):
            for inputs, labels in train:
                training.step(inputs, labels)
                if measures and training.step_in_epoch == 3:
                    arguments = {"evaluate": (train, "mse"), "predict": (train,)}[measure]
                    getattr(training, measure)(*arguments)
                positions.append(train.position)
        return net.weight.data().asnumpy().tolist(), trainer.optimizer.num_update, positions

    assert train(True) == train(False)


@pytest.mark.parametrize("num_workers", [3, 5])  # process 0 has one sample of the first batch, or none
def test_a_repeated_step_gets_all_samples_of_a_list_that_is_divided_anew(num_workers):
    part = shard_loader(loader("lists"), 0, num_workers, seed=0)
    batches = iter(part)
    images, labels = next(batches)
    assert len(images) == len(labels) == (num_workers == 3)
    steps = [record_step(0, arguments, [part]) for arguments in ((images, {"y": labels}), ((images, labels),))]
    some = [record_step(0, (images[0],), [part])] if images else []
    part.divide(0, 1)
    for step in steps:
        part.under_way.go_to(0)
        *_, found = map_arrays(lambda array: array.asnumpy().max(), arguments_of(step))
        labels = found["y"] if isinstance(found, dict) else found[1]
        assert labels == [0, 1, 2, 3]
    for step in some:
        part.under_way.go_to(0)
        with pytest.raises(gp.errors.BatchMismatch, match="4 parts where it had 1, of which the step was"):
            arguments_of(step)
