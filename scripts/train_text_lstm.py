"""Train an LSTM to classify texts, on several devices that wait for each other as much as `mode` says.

    python scripts/train_text_lstm.py                                          synchronous; the embedded stories
    python scripts/train_text_lstm.py --config configs/text_lstm/async.yaml    or --mode ssp:2, dc:0.04, local:8 ...
    python scripts/train_text_lstm.py --config configs/text_lstm/ag_news.yaml  news of four kinds
    python scripts/train_text_lstm.py --resume                                 continue the newest run

Under the launcher, on several processes: --mode sync with --kvstore dist_sync (or mpi), local:8 with any of these, and
async with dist_async. Every run gets a folder of its own, runs/text_lstm/<config>/<number>.
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
class Config(gp.config.Training):
    dataset: str = option("before_after, ag_news or imdb")
    epochs: gp.config.PositiveInt = option("passes over the training texts")
    batch_size: gp.config.PositiveInt = option(
        "texts per step of a process, over its devices (sync), or of each device"
    )
    mode: str = option("sync, backup:b, ssp:s, local:H, elastic:beta, async or dc:lambda")
    clip_norm: gp.config.PositiveFloat = option("gradients are scaled down to this norm")
    embed_size: gp.config.PositiveInt = option("numbers per word")
    hidden_size: gp.config.PositiveInt = option("numbers in the LSTM's state")
    num_layers: gp.config.PositiveInt = option("LSTMs upon each other")
    dropout: gp.config.NonNegativeFloat = option("share of the numbers set to 0 in training")
    vocab_size: gp.config.PositiveInt = option("at most so many different words")
    max_length: gp.config.PositiveInt = option("words of a text that are read")
    equal_tokens: bool = option("sync: give devices equally many tokens, not equally many texts")
    reject_above: Optional[gp.config.NonNegativeInt] = option("async, ssp, dc: do without gradients staler than this")


class Together:
    """Every step is one of all devices, and of all processes unless these only average now and then."""

    staleness = None

    def __init__(self, make_net, loss, devices, store, config):
        self.net = make_net(devices)
        local = gp.asynchronous.check_store(config.mode, store).name == "local"
        across = None if local or store.num_workers == 1 else store
        self.trainer = gluon.Trainer(self.net.collect_params(), "adam", {"learning_rate": config.lr}, kvstore=across)
        split = gp.datasets.text.split_by_tokens if config.equal_tokens else None
        self.step = gp.DataParallel(
            self.net, loss, self.trainer, devices=devices, clip_global_norm=config.clip_norm, split=split
        )
        every = int(gp.asynchronous.parse_mode(config.mode).value) if local else None
        self.averaging = gp.asynchronous.Averaging(self.net, store, every) if every else None

    def train(self, progress):
        for texts, labels in progress:
            progress.add(self.step(texts, labels), self.step.num_samples)
            if self.averaging is not None:
                self.averaging.step()
        if self.averaging is not None:
            self.averaging.average()

    def state(self):
        return gp.checkpoint.state(self.net, self.trainer)

    def restore(self, state, folder):
        gp.checkpoint.restore(state, self.net, self.trainer, source=folder)


class OnTheServer(Together):
    """Every process takes its own steps; the weights are on MXNet's servers, where checkpoints do not reach."""

    def __init__(self, make_net, loss, devices, store, config):
        self.net = make_net(devices)
        self.served = gp.asynchronous.Served(
            self.net, loss, devices, store, "adam", {"learning_rate": config.lr}, config.clip_norm
        )

    def train(self, progress):
        self.served.train(progress, observe=lambda loss, count: progress.add(mx.nd.array([loss]), count))

    def state(self):
        return gp.checkpoint.state(self.net)

    def restore(self, state, folder):
        gp.checkpoint.restore(state, self.net, source=folder)


class Apart:
    """Every device takes its own steps, in a thread of its own, with a net of its own."""

    def __init__(self, make_net, loss, devices, config):
        self.parallel = gp.asynchronous.Asynchronous(
            lambda: make_net(None), loss, devices, config.mode, "adam", {"learning_rate": config.lr},
            clip_global_norm=config.clip_norm, reject_above=config.reject_above,
        )  # fmt: skip

    @property
    def net(self):
        return self.parallel.net

    @property
    def staleness(self):
        return self.parallel.staleness

    def train(self, progress):
        self.parallel.train(progress, observe=lambda loss, count: progress.add(mx.nd.array([loss]), count))

    def state(self):
        return self.parallel.state()

    def restore(self, state, folder):
        self.parallel.restore(state)


def learner(make_net, loss, devices, store, config) -> Any:
    """Who trains: all devices as one, each by itself, or each process by itself."""
    if "dist" not in store.type and store.num_workers == 1:
        together = config.mode == "sync"
        return (Together(make_net, loss, devices, store, config) if together
                else Apart(make_net, loss, devices, config))  # fmt: skip
    mode = gp.asynchronous.check_store(config.mode, store)
    return (OnTheServer if mode.name == "async" else Together)(make_net, loss, devices, store, config)


def until(batches: Any, run: gp.runs.Run) -> Iterator[Any]:
    """The batches, as long as nobody has asked to stop."""
    for batch in batches:
        if run.stop_requested:
            return
        yield batch


def main(config: Config, run: gp.runs.Run) -> None:
    devices = gp.devices(config.devices)
    store = run.store  # how processes meet
    gp.asynchronous.parse_mode(config.mode)
    run.tell(f"{run.folder}: an LSTM on {config.dataset}, mode {config.mode}, running on: {devices}")

    text = gp.datasets.text
    data = text.load(config.dataset, root=config.data_root)
    vocabulary = text.Vocabulary(data.train.texts, config.vocab_size)
    train_texts, test_texts = (vocabulary.encode_all(part.texts, config.max_length) for part in (data.train, data.test))
    train = text.batches(
        train_texts, data.train.labels, config.batch_size, shuffle=True, seed=config.seed,
        rank=store.rank, num_workers=store.num_workers,
    )  # fmt: skip
    test = text.batches(test_texts, data.test.labels, batch_size=256)
    # As many training texts as there are for testing tell the training accuracy well enough.
    num_seen = len(data.test.labels)
    seen = text.batches(train_texts[:num_seen], data.train.labels[:num_seen], batch_size=256)

    def make_net(contexts):
        net = gp.models.TextLSTM(
            len(vocabulary), data.num_classes, config.embed_size, config.hidden_size, config.num_layers, config.dropout
        )
        net.initialize(mx.init.Xavier(), ctx=contexts)
        net.hybridize()
        return net

    gp.reseed(config.seed)
    trained = learner(make_net, gluon.loss.SoftmaxCrossEntropyLoss(), devices, store, config)
    if run.state is not None:
        trained.restore(run.state, str(run.folder))

    for epoch in range(run.position.epoch, config.epochs):
        train.set_epoch(epoch)
        gp.reseed(config.seed, epoch + 1, store.rank)
        progress = run.progress(until(train, run), epoch)
        train.set_epoch(epoch, start=progress.step)
        trained.train(progress)
        if run.stop_requested:
            run.save(trained.state(), epoch, within=progress)
        loss, rate = progress.loss, progress.images_per_second
        home = devices if isinstance(trained, Together) else devices[:1]  # where the net is
        [(_, train_accuracy)] = gp.evaluate(trained.net, seen, "acc", home)
        [(_, test_accuracy)] = gp.evaluate(trained.net, test, "acc", home)
        measured = {}
        if trained.staleness is not None:
            median, ninetieth, most = trained.staleness.quantiles()
            measured = {"staleness": trained.staleness.mean, "staleness_median": median,
                        "staleness_90_percent": ninetieth, "staleness_most": most}  # fmt: skip
        run.report.add(
            epoch=epoch + 1, loss=loss, train_accuracy=train_accuracy, test_accuracy=test_accuracy,
            texts_per_second=rate, **measured,
        )  # fmt: skip
        run.save(trained.state(), epoch + 1, score=test_accuracy)

    checkpoint, picture = run.finish()
    run.tell(f"checkpoint: {checkpoint}\ncurves:     {picture}")
    if trained.staleness is not None:
        figure = trained.staleness.draw(f"{config.mode} on {config.dataset}", names=[str(d) for d in devices])
        figure.savefig(run.folder / "staleness.png", dpi=144)
        run.tell(f"staleness:  {run.folder / 'staleness.png'} ({trained.staleness})")


if __name__ == "__main__":
    sys.exit(gp.entry.start(main, Config, DEFAULT, description=__doc__))
