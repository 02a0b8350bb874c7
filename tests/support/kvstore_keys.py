"""Check of the keys of MXNet's servers: each is opened once and keeps its form."""

import re

import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.kvstore.flight_recorder.ring import RECORDER, read
from mxnet import nd


def check_keys_are_opened_once_and_keep_their_form(store):
    """A process has one store over MXNet's servers, each key is opened once, and keeps its form."""
    assert mx.kv.create(store.type) is store
    mistakes = [
        (gp.errors.StoreUnavailable, "one store", lambda: mx.kv.create("dist_async")),
        (
            ValueError,
            "key 3: it is open already, with float32 (4,)",
            lambda: store.broadcast(3, nd.ones(4), nd.ones(4)),
        ),
        (gp.errors.ArrayMismatch, "key 3: it was opened with float32 (4,)", lambda: store.pushpull(3, nd.ones(5))),
        (gp.errors.ArrayMismatch, "now gets float64", lambda: store.pushpull(3, [nd.ones(4, dtype="float64")])),
    ]
    store.broadcast(3, nd.ones(4), nd.ones(4))
    for kind, words, mistake in mistakes:
        with pytest.raises(kind, match=re.escape(words)):
            mistake()
    array = nd.ones(4)
    store.pushpull(3, array)
    assert (array.asnumpy() == store.num_workers).all()
    store.broadcast([4, 5], [nd.ones(2), nd.ones(3)], [nd.ones(2), nd.ones(3)])
    store.pull([4, 5], [nd.ones(2), nd.ones(3)])
    store.push(4, [nd.ones(2), nd.ones(2, ctx=mx.cpu(1))])
    store.pull(4, nd.ones(2))
    mx.nd.waitall()
    recorded = {(entry.kind, entry.size, entry.call) for entry in read(RECORDER.memory) if entry.key == "4"}
    assert recorded == {("broadcast", 8, 1), ("pull", 8, 1), ("push", 8, 1), ("pull", 8, 2)}
    sums = [entry for entry in read(RECORDER.memory) if (entry.kind, entry.key) == ("sum", "3")]
    assert [(entry.size, entry.call, 0 < entry.asked <= entry.done) for entry in sums] == [(16, 1, True)]
    assert list(RECORDER.others) == [1 - store.rank]
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    with pytest.raises(ValueError, match="leave compression_params out"):
        store.pushpull(3, array)
