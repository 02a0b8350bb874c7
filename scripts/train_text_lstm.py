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
class Config(gp.config.MixedPrecisionConfig):
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
    sparse_grad: bool = option("exchange and update only the vectors of a batch's words; for mode sync")
    max_length: gp.config.PositiveInt = option("words of a text that are read")
    reject_above: Optional[gp.config.NonNegativeInt] = option("async, ssp, dc: do without gradients staler than this")


class Together:
    """Every step is one of all devices, and of all processes unless these only average now and then."""

    staleness = None  # nothing is ever stale
    saved: dict[str, Any] = {}

    def __init__(self, make_net, loss, devices, config, store):
        self.devices, self.store = devices, store
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

    def train(self, loop):
        for texts, labels in loop.loaders[0]:
            if self.averaging is None:
                loop.add(self.step(texts, labels), self.step.num_samples)
                continue
            loss = self.step(texts, labels) if len(labels) else mx.nd.zeros(1)  # a last batch may have too few texts
            self.averaging.step()
            loop.add(loss, len(labels))
        if self.averaging is not None:
            self.averaging.average()


class OnTheServer:
    """Every process takes its own steps; weights and optimizer are on MXNet's servers.

    A checkpoint has the weights alone: it does not reach the optimizer there, which begins anew in a resumed run.
    """

    store = trainer = None  # nobody waits, not for testing either: process 0 tests for all
    staleness = staleness_of_epoch = None
    saved: dict[str, Any] = {}

    def __init__(self, make_net, loss, devices, config, store):
        self.devices, self.net = devices, make_net(devices)
        optimizer = "adam", {"learning_rate": config.lr}
        self.serve = lambda: gp.asynchronous.Served(self.net, loss, devices, store, *optimizer, config.clip_global_norm)
        self.served = None  # the servers take the weights of that moment, which may be restored ones

    def train(self, loop):
        if self.served is None:
            self.served = self.serve()
        done = self.served.train(
            until_stopped(loop), observe=lambda loss, count: loop.count(mx.nd.array([loss]), count)
        )
        self.staleness_of_epoch, self.staleness = done.staleness, self.served.staleness


class Apart:
    """Every device takes its own steps, in a thread of its own, with a net of its own."""

    store = trainer = None  # one process
    staleness = staleness_of_epoch = None

    def __init__(self, make_net, loss, devices, config, store):
        self.devices = devices[:1]  # where `net` is
        self.parallel = gp.asynchronous.Asynchronous(
            lambda: make_net(None), loss, devices, config.mode, "adam", {"learning_rate": config.lr},
            clip_global_norm=config.clip_global_norm, reject_above=config.reject_above,
        )  # fmt: skip
        self.net, self.saved = self.parallel.net, {"asynchronous": self.parallel}

    def train(self, loop):
        done = self.parallel.train(
            until_stopped(loop), observe=lambda loss, count: loop.count(mx.nd.array([loss]), count)
        )
        self.staleness_of_epoch, self.staleness = done.staleness, self.parallel.staleness


def until_stopped(loop: gp.Loop) -> Iterator[Any]:
    """The batches of an epoch, as long as nobody has pressed Ctrl-C."""
    for batch in loop.loaders[0]:
        yield batch
        if loop.stop_requested:
            return


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


def main(config: Config, run: gp.Run) -> None:
    devices, store = gp.devices(config.devices), gp.kvstore.create(config.kvstore)  # where we run
    kind = who_trains(config, store)
    if config.precision == "float16" and kind is not Together:
        raise gp.errors.ConfigError(f"--precision float16: mode {config.mode} has no loss scale; take sync or bfloat16")
    if config.patience is not None and kind is OnTheServer:
        raise gp.errors.ConfigError(f"--patience {config.patience}: in mode {config.mode} process 0 alone knows scores")
    if config.sparse_grad and config.mode != "sync":
        raise gp.errors.ConfigError(f"--sparse_grad: mode {config.mode} exchanges dense arrays; add --no_sparse_grad")
    own = len(devices) if kind is Apart else 1  # devices that take batches of their own
    if config.batch_size % own:
        raise gp.errors.ConfigError(f"--batch_size {config.batch_size} is no multiple of {own} devices")

    text = gp.datasets.text
    data = text.load(config.dataset, root=config.data_root)
    vocabulary = text.Vocabulary(data.train.texts, config.vocab_size)
    train_texts, test_texts = (
        [vocabulary.encode(text, config.max_length) for text in part.texts] for part in (data.train, data.test)
    )
    train = text.batches(train_texts, data.train.labels, config.batch_size // own, shuffle=True, seed=config.seed)
    test = text.batches(test_texts, data.test.labels, batch_size=256)
    # As many training texts as there are for testing tell the training accuracy well enough.
    num_seen = len(data.test.labels)
    seen = text.batches(train_texts[:num_seen], data.train.labels[:num_seen], batch_size=256)

    def make_net(contexts):
        net = gp.models.TextLSTM(
            len(vocabulary), data.num_classes, config.embed_size, config.hidden_size, config.num_layers, config.dropout,
            config.sparse_grad,
        )  # fmt: skip
        net.initialize(mx.init.Xavier(), ctx=contexts)
        net.hybridize()
        return net

    trained = kind(make_net, gluon.loss.SoftmaxCrossEntropyLoss(), devices, config, store)
    loop = gp.Loop(
        train, *([test, seen] if kind is Together else []), net=trained.net, trainer=trained.trainer, store=store,
        seed=config.seed, run=run, saved=trained.saved,
    )  # fmt: skip
    if kind is Together:
        _, test, seen = loop.loaders
    loop.print(f"{run.folder}: an LSTM on {config.dataset}, mode {config.mode}, running on: {loop} x {devices}")
    for _epoch in loop.epochs(config.epochs, config.patience):
        trained.train(loop)
        loop.stop_if_asked()
        if kind is not Together and not loop.is_main:
            continue
        [(_, train_accuracy)] = gp.evaluate(trained.net, seen, "acc", trained.devices, trained.store)
        [(_, test_accuracy)] = gp.evaluate(trained.net, test, "acc", trained.devices, trained.store)
        measured = {}
        if trained.staleness is not None:
            median, ninetieth, most = trained.staleness_of_epoch.quantiles()
            measured = {"staleness": trained.staleness_of_epoch.mean, "staleness_median": median,
                        "staleness_90_percent": ninetieth, "staleness_most": most}  # fmt: skip
        loop.end_epoch(score=test_accuracy, train_accuracy=train_accuracy, test_accuracy=test_accuracy, **measured)

    if trained.staleness is not None and loop.is_main:
        loop.print(trained.staleness)


if __name__ == "__main__":
    sys.exit(gp.start(main, Config, DEFAULT, description=__doc__))
