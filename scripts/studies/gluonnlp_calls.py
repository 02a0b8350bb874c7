"""Calls of what scripts with GluonNLP use most, by name; `gluoncv_functions.py` runs them."""

from __future__ import annotations

import importlib.util

import numpy as np

import mxnet as mx
from mxnet import gluon, nd

from gluoncv_layers import output
from gluoncv_transforms import Case, gradient, uniform


def gluonnlp() -> dict[str, Case]:
    """What scripts with GluonNLP use most."""
    if importlib.util.find_spec("gluonnlp") is None:
        return {}
    import gluonnlp as nlp

    counter = nlp.data.count_tokens("a a a b b c".split())
    vocabulary = nlp.Vocab(counter)
    rows, lengths = [np.arange(n) for n in (3, 5, 4, 2)], [3, 5, 4, 2]
    batchify, masked = nlp.data.batchify, nlp.loss.MaskedSoftmaxCELoss()
    model = lambda: nlp.model.StandardRNN("lstm", 20, 4, 4, 1, 0.0, tie_weights=False)  # noqa: E731

    def embedding():
        found = nlp.embedding.TokenEmbedding(
            unknown_token="<unk>", idx_to_token=["<unk>", "a"], idx_to_vec=nd.array(uniform(2, 3))
        )
        vocabulary.set_embedding(found)
        return vocabulary.embedding["a"]

    def bert():
        encoder = nlp.model.BERTEncoder(units=8, hidden_size=16, num_layers=1, num_heads=2, max_length=8)
        net = nlp.model.BERTModel(encoder, 20, 2, 8, 8)
        net.initialize(mx.init.One())
        return [
            one
            for one in net(nd.ones((2, 5)), nd.zeros((2, 5)), nd.array([5, 3]), nd.array([[0, 1]] * 2))
            if isinstance(one, nd.NDArray)
        ]

    def corpus():
        found = nlp.data.batchify.CorpusBatchify(vocabulary, 2)(gluon.data.SimpleDataset("a b c a b c a b".split()))
        return list(found)

    return {
        "nlp Vocab": lambda: [vocabulary[["a", "z"]], vocabulary.to_indices("b")],
        "nlp embedding": embedding,
        "nlp batchify": lambda: [
            batchify.Pad(ret_length=True)(rows),
            batchify.Stack()(lengths),
            batchify.Tuple(batchify.Pad(), batchify.List())([*zip(rows, lengths)]),
        ],
        "nlp CorpusBatchify": corpus,
        "nlp samplers": lambda: [
            [*nlp.data.FixedBucketSampler(lengths, 2, 2, shuffle=True)],
            [*nlp.data.SortedBucketSampler(lengths, 2)],
            [*nlp.data.SortedSampler(lengths)],
        ],
        "nlp FixedBucketSampler": lambda: [
            *nlp.data.FixedBucketSampler(lengths, 2, num_buckets=2, ratio=0.5, bucket_scheme=nlp.data.ExpWidthBucket())
        ],
        "nlp transforms": lambda: [
            nlp.data.PadSequence(5)([1, 2]),
            nlp.data.ClipSequence(1)([1, 2]),
            len(nlp.data.SacreMosesTokenizer.__name__),
        ],
        "nlp MaskedSoftmaxCELoss": lambda: gradient(
            masked, uniform(2, 3, 4), nd.array([[0, 1, 2]] * 2), nd.array([3, 1])
        ),
        "nlp LabelSmoothing": lambda: nlp.loss.LabelSmoothing(units=4)(nd.array([0, 1])),
        "nlp ActivationRegularizationLoss": lambda: nlp.loss.ActivationRegularizationLoss(2)(nd.array(uniform(2, 3))),
        "nlp StandardRNN": lambda: output(model(), nd.ones((3, 2)))[0],
        "nlp BERTModel": bert,
        "nlp BeamSearch": lambda: nlp.model.BeamSearchSampler(
            2, lambda data, states: (nd.array(uniform(4, 5)), states), 4
        )(nd.array([0, 1]), nd.zeros((2, 1))),
        "nlp TransformerEncoder": lambda: output(
            nlp.model.TransformerEncoder(units=8, hidden_size=8, num_heads=2, num_layers=1, max_length=10),
            nd.array(uniform(2, 5, 8)),
            None,
            nd.array([5, 3]),
        )[0],
        "nlp ngram hashes": lambda: nlp.vocab.create_subword_function("NGramHashes", num_subwords=50)(["ab", "c"]),
        "nlp BERTAdam": lambda: _adam(),
    }


def _adam():
    net = gluon.nn.Dense(2, in_units=2)
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "bertadam", {"learning_rate": 0.1})
    with mx.autograd.record():
        loss = net(nd.array(uniform(3, 2)))
    loss.backward()
    trainer.step(3)
    return net.weight.data()
