"""Train an LSTM to classify texts, on several devices that wait for each other as much as `mode` says.

    python scripts/train_text_lstm.py                                          synchronous; the embedded stories
    python scripts/train_text_lstm.py --config configs/text_lstm/async.yaml    or --mode ssp:2, dc:0.04, local:8 ...
    python scripts/train_text_lstm.py --config configs/text_lstm/ag_news.yaml  news of four kinds
    python scripts/train_text_lstm.py --resume                                 continue the newest run

Two processes of the launcher; sync and local:8 work over either engine, async over MXNet's servers alone:

    gluon-parallel launch -n 2 --devices cpu:1 scripts/train_text_lstm.py --mode local:8
    gluon-parallel launch -n 2 --devices cpu:1 --engine ps scripts/train_text_lstm.py --mode async --kvstore dist_async

Every run gets a folder of its own, runs/text_lstm/<config>/<number>.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import gluon_parallel as gp
import mxnet as mx
from mxnet import gluon

DEFAULT = Path(__file__).resolve().parent.parent / "configs" / "text_lstm" / "default.yaml"
option = gp.config.option


@dataclasses.dataclass(frozen=True)
class Config(gp.config.MixedPrecisionTraining):
    dataset: str = option("before_after, ag_news or imdb")
    kvstore: str = option("how processes meet: auto (as they were started), mpi, dist_sync, dist_async", "auto")
    epochs: gp.config.PositiveInt = option("passes over the training texts")
    batch_size: gp.config.PositiveInt = option(
        "texts per step, over all devices and processes together; in other modes than sync, whoever takes steps of its "
        "own takes its share of them"
    )
    mode: str = option("sync, backup:b, ssp:s, local:H, elastic:beta, async or dc:lambda")
    clip_global_norm: gp.config.PositiveFloat = option("gradients are scaled down to this norm")
    embed_size: gp.config.PositiveInt = option("numbers per word")
    hidden_size: gp.config.PositiveInt = option("numbers in the LSTM's state")
    num_layers: gp.config.PositiveInt = option("LSTMs upon each other")
    dropout: gp.config.NonNegativeFloat = option("share of the numbers set to 0 in training")
    vocab_size: gp.config.PositiveInt = option("at most so many different words")
    max_length: gp.config.PositiveInt = option("words of a text that are read")
    reject_above: Optional[gp.config.NonNegativeInt] = option("async, ssp, dc: do without gradients staler than this")


class Together:
    """Every step is one of all devices, and of all processes unless these only average now and then."""

    staleness = None  # nothing is ever stale

    def __init__(self, make_net, loss, devices, config, store):
        self.devices, self.store, self.seed = devices, store, config.seed + store.rank
        self.net = make_net(devices)
        mode = gp.asynchronous.parse_mode(config.mode)
        across = store if mode.name == "sync" else None
        self.trainer = gluon.Trainer(self.net.collect_params(), "adam", {"learning_rate": config.lr}, kvstore=across)
        self.step = gp.DataParallel(  # whose devices get equally many tokens, not equally many texts
            self.net, loss, self.trainer, devices=devices, clip_global_norm=config.clip_global_norm,
            split=gp.datasets.text.split_by_tokens,
        )  # fmt: skip
        local = mode.name == "local"
        self.averaging = gp.asynchronous.Averaging(self.net, store, int(mode.value)) if local else None

    def train(self, progress, epoch):
        for texts, labels in progress:
            gp.reseed(self.seed, epoch + 1, progress.step)
            if len(labels) or self.averaging is None:  # a last batch may have fewer texts than there are processes
                progress.add(self.step(texts, labels), self.step.num_samples)
            if self.averaging is not None:
                self.averaging.step()
        if self.averaging is not None:
            self.averaging.average()

    def state(self):
        return gp.checkpoint.state(self.net, self.trainer)

    def restore(self, state, folder):
        gp.checkpoint.restore(state, self.net, self.trainer, source=folder)


class OnTheServer:
    """Every process takes its own steps; weights and optimizer are on MXNet's servers.

    A checkpoint has the weights alone: it does not reach the optimizer there, which begins anew in a resumed run.
    """

    store = None  # nobody waits, not for testing either: process 0 tests for all
    staleness = staleness_of_epoch = None

    def __init__(self, make_net, loss, devices, config, store):
        self.devices, self.net = devices, make_net(devices)
        optimizer = "adam", {"learning_rate": config.lr}
        self.serve = lambda: gp.asynchronous.Served(self.net, loss, devices, store, *optimizer, config.clip_global_norm)
        self.served = None  # the servers take the weights of that moment, which may be restored ones

    def train(self, progress, epoch):
        if self.served is None:
            self.served = self.serve()
        done = self.served.train(progress, observe=lambda loss, count: progress.add(mx.nd.array([loss]), count))
        self.staleness_of_epoch, self.staleness = done.staleness, self.served.staleness

    def state(self):
        return gp.checkpoint.state(self.net)

    def restore(self, state, folder):
        gp.checkpoint.restore(state, self.net, source=folder)


class Apart:
    """Every device takes its own steps, in a thread of its own, with a net of its own."""

    store = None  # one process
    staleness = staleness_of_epoch = None

    def __init__(self, make_net, loss, devices, config, store):
        self.devices = devices[:1]  # where `net` is
        self.parallel = gp.asynchronous.Asynchronous(
            lambda: make_net(None), loss, devices, config.mode, "adam", {"learning_rate": config.lr},
            clip_global_norm=config.clip_global_norm, reject_above=config.reject_above,
        )  # fmt: skip
        self.net = self.parallel.net

    def train(self, progress, epoch):
        done = self.parallel.train(progress, observe=lambda loss, count: progress.add(mx.nd.array([loss]), count))
        self.staleness_of_epoch, self.staleness = done.staleness, self.parallel.staleness

    def state(self):
        return self.parallel.state()

    def restore(self, state, folder):
        self.parallel.restore(state)


def who_trains(config, store) -> Any:
    """All devices as one, each by itself, or each process by itself."""
    mode = gp.asynchronous.parse_mode(config.mode)
    if "dist" not in store.type and store.num_workers == 1 and mode.name != "sync":
        return Apart
    gp.asynchronous.check_store(config.mode, store)
    if config.reject_above is not None:
        where = "" if store.num_workers == 1 else " across processes"
        raise gp.errors.ConfigError(
            f"--reject_above {config.reject_above}: in mode {mode}{where} nothing is rejected; leave it out, or take "
            "ssp, async or dc in one process"
        )
    return OnTheServer if mode.name == "async" else Together


def share(batch_size: int, num: int, of_whom: str) -> int:
    """The texts that each of `num` gets."""
    if batch_size % num:
        raise gp.errors.ConfigError(f"--batch_size {batch_size} is no multiple of {num} {of_whom}, each with its share")
    return batch_size // num


class UntilStopped:
    """The batches, as long as nobody has asked the run to stop."""

    def __init__(self, batches: Any, run: gp.runs.Run) -> None:
        self.batches, self.run = batches, run

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if self.run.stop_requested:
                return
            yield batch


def main(config: Config, run: gp.runs.Run) -> None:
    devices, store = gp.devices(config.devices), run.store  # where we run
    kind = who_trains(config, store)
    if config.precision == "float16" and kind is not Together:
        raise gp.errors.ConfigError(f"--precision float16: mode {config.mode} has no loss scale; take sync or bfloat16")
    run.tell(f"{run.folder}: an LSTM on {config.dataset}, mode {config.mode}, running on: {run.where(devices)}")

    text = gp.datasets.text
    data = text.load(config.dataset, root=config.data_root)
    vocabulary = text.Vocabulary(data.train.texts, config.vocab_size)
    train_texts, test_texts = (
        [vocabulary.encode(text, config.max_length) for text in part.texts] for part in (data.train, data.test)
    )
    part = {"rank": store.rank, "num_workers": store.num_workers}  # of every batch
    of_whom = (len(devices), "devices") if kind is Apart else (store.num_workers, "processes")
    size = share(config.batch_size, *of_whom)
    train = text.batches(train_texts, data.train.labels, size, shuffle=True, seed=config.seed, **part)
    tested = part if kind is Together else {}
    test = text.batches(test_texts, data.test.labels, batch_size=256, **tested)
    # As many training texts as there are for testing tell the training accuracy well enough.
    num_seen = len(data.test.labels)
    seen = text.batches(train_texts[:num_seen], data.train.labels[:num_seen], batch_size=256, **tested)

    def make_net(contexts):
        net = gp.models.TextLSTM(
            len(vocabulary), data.num_classes, config.embed_size, config.hidden_size, config.num_layers, config.dropout
        )
        net.initialize(mx.init.Xavier(), ctx=contexts)
        net.hybridize()
        return net

    gp.reseed(config.seed)
    trained = kind(make_net, gluon.loss.SoftmaxCrossEntropyLoss(), devices, config, store)
    if run.state is not None:
        trained.restore(run.state, str(run.folder))

    for epoch in range(run.position.epoch, config.epochs):
        gp.reseed(config.seed + store.rank, epoch + 1)
        progress = run.progress(UntilStopped(train, run), epoch)
        train.set_epoch(epoch, start=progress.step)
        trained.train(progress, epoch)
        if run.stop_requested:
            run.save(trained.state(), epoch, within=progress)
        if kind is Together:
            loss, rate, _ = progress.together(store)
        else:
            loss, rate = progress.loss, progress.images_per_second
        if kind is not Together and not run.writes:
            continue
        [(_, train_accuracy)] = gp.evaluate(trained.net, seen, "acc", trained.devices, trained.store)
        [(_, test_accuracy)] = gp.evaluate(trained.net, test, "acc", trained.devices, trained.store)
        measured = {}
        if trained.staleness is not None:
            median, ninetieth, most = trained.staleness_of_epoch.quantiles()
            measured = {"staleness": trained.staleness_of_epoch.mean, "staleness_median": median,
                        "staleness_90_percent": ninetieth, "staleness_most": most}  # fmt: skip
        run.report.add(
            epoch=epoch + 1, loss=loss, train_accuracy=train_accuracy, test_accuracy=test_accuracy,
            texts_per_second=rate, **measured,
        )  # fmt: skip
        run.save(trained.state(), epoch + 1, score=test_accuracy)

    checkpoint, picture = run.finish()
    run.tell(f"checkpoint: {checkpoint}\ncurves:     {picture}")
    if trained.staleness is not None and run.writes:
        names = [str(device) for device in devices] if kind is Apart else []
        figure = trained.staleness.draw(f"{config.mode} on {config.dataset}", names)
        figure.savefig(run.folder / "staleness.png", dpi=144)
        run.tell(f"staleness:  {run.folder / 'staleness.png'} ({trained.staleness})")


if __name__ == "__main__":
    sys.exit(gp.entry.start(main, Config, DEFAULT, description=__doc__))
