"""TextLSTM reads every text to its own end and no further, and learns the same on one device and on three."""

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from gluon_parallel.datasets.text.text_batches import shard_ends
from mxnet import gluon

pytestmark = pytest.mark.arithmetic

text = gp.datasets.text
DEVICES = [mx.cpu(0), mx.cpu(1), mx.cpu(2)]


def make(devices, vocab=20, classes=3, **options):
    net = gp.models.TextLSTM(vocab, classes, embed_size=5, hidden_size=6, **options)
    net.initialize(mx.init.Xavier(magnitude=4), ctx=devices)
    net.hybridize()
    return net


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(net, tokens):
    """One text through one LSTM layer, word by word, in float64."""
    embedding, i2h, h2h, i2h_bias, h2h_bias, dense, bias = (
        p.data().asnumpy().astype("float64") for p in net.collect_params().values()
    )
    h = c = np.zeros(6)
    for token in tokens:
        i, f, g, o = np.split(i2h @ embedding[token] + i2h_bias + h2h @ h + h2h_bias, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
    return dense @ h + bias


def random_texts(rng, lengths):
    return [rng.integers(2, 20, size=length) for length in lengths]


def pad(texts):
    """The texts as one batch: tokens and lengths."""
    [(batch, _)] = text.batches(texts, np.zeros(len(texts)), len(texts), multiple=1)
    return batch


def test_the_net_is_an_lstm_word_by_word(rng):
    net, texts = make(mx.cpu()), random_texts(rng, [4, 1, 7, 3])
    tokens, lengths = pad(texts)
    got = net(mx.nd.array(tokens), mx.nd.array(lengths)).asnumpy()
    # float32, seven steps
    np.testing.assert_allclose(got, [by_hand(net, words) for words in texts], rtol=1e-4, atol=1e-5)


def test_what_stands_behind_a_text_has_no_influence_on_outputs_and_gradients(rng):
    net, texts = make(mx.cpu()), random_texts(rng, [4, 1, 7, 3])
    tokens, lengths = pad(texts)
    garbage = np.concatenate([tokens, rng.integers(2, 20, size=(4, 5))], axis=1)
    for row, length in zip(garbage, lengths.astype(int)):
        row[length:] = rng.integers(2, 20, size=12 - length)
    head, found = mx.nd.array(rng.normal(size=(4, 3))), []
    for padded in (tokens, garbage):
        with mx.autograd.record():
            outputs = net(mx.nd.array(padded), mx.nd.array(lengths))
            value = (outputs * head).sum()
        value.backward()
        found.append([outputs.asnumpy(), *(p.grad().asnumpy() for p in net.collect_params().values())])
    for clean, dirty in zip(*found):
        np.testing.assert_allclose(dirty, clean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("split", [None, text.split_by_tokens], ids=["equal texts", "equal tokens"])
@pytest.mark.parametrize("lengths", [[9, 2, 5, 1, 7, 7, 3], [30, 1, 1, 1, 1, 1], [4, 4]])
def test_texts_of_unequal_lengths_give_the_same_gradients_on_one_and_on_three_devices(rng, split, lengths):
    tokens, valid = pad(random_texts(rng, lengths))
    labels = rng.integers(3, size=len(lengths))
    nets = [make(DEVICES[:1]), make(DEVICES)]
    for mine, other in zip(*(net.collect_params().values() for net in nets)):
        other.set_data(mine.data())
    gradients = []
    for net, devices in zip(nets, (DEVICES[:1], DEVICES)):
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
        loss = gluon.loss.SoftmaxCrossEntropyLoss()
        step = gp.DataParallel(net, loss, trainer, devices=devices, split=split if len(devices) > 1 else None)
        value = step((tokens, valid), labels)
        gradients.append([value.asnumpy(), *(p.list_grad()[-1].asnumpy() for p in net.collect_params().values())])
    for one, three in zip(*gradients):
        # float32: the same numbers added in another order
        np.testing.assert_allclose(three, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_no_other_cut_of_the_sorted_texts_costs_its_largest_shard_less(rng, num_shards):
    for _ in range(20):
        lengths = np.sort(rng.integers(1, 30, size=7))[::-1]

        def cost(ends, lengths=lengths):
            starts = [0, *ends[:-1]]
            return max(lengths[start] * (end - start) for start, end in zip(starts, ends))

        best = min(
            cost(sorted({*(position for position in range(1, 7) if mask >> position & 1), 7}))
            for mask in range(128)
            if bin(mask >> 1 & 63).count("1") < num_shards
        )
        found = shard_ends(lengths, num_shards)
        assert len(found) <= num_shards and found[-1] == 7
        assert cost(found) == best


def test_split_by_tokens_loses_nothing_and_pads_each_shard_to_its_own_longest(rng):
    texts = random_texts(rng, [20, 3, 4, 2, 5, 3, 6])
    tokens, lengths = pad(texts)
    labels = np.arange(7)
    shards = text.split_by_tokens((((mx.nd.array(tokens)), lengths), (labels,)), DEVICES)
    seen = []
    for ((shard, valid), (mine,)), device in zip(shards, DEVICES):
        assert shard.context == device
        assert shard.shape[1] == int(valid.asnumpy().max())
        for row, length, label in zip(shard.asnumpy(), valid.asnumpy(), mine.asnumpy()):
            np.testing.assert_array_equal(row[: int(length)], texts[int(label)])
            seen.append(int(label))
    assert sorted(seen) == list(range(7))
    assert max(shard[0][0].size for shard in shards) == 20
    assert len(text.split_by_tokens(((tokens[:2], lengths[:2]), labels[:2]), DEVICES)) == 2
