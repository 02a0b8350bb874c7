"""A loop of ``gluon.Trainer`` over MXNet's servers, of which process 1 does not reach one layer; other divisors.

Each process runs ``python trainer_on_servers.py STORE``.
"""

import sys
import warnings

import numpy as np
import pytest

import gluon_parallel as gp
import mxnet as mx
from mxnet import autograd, gluon, nd


def main():
    store = gp.kvstore.create(sys.argv[1])
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(1, in_units=1, use_bias=False), gluon.nn.Dense(1, in_units=1, use_bias=False))
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.5}, kvstore=store)
    if "async" not in store.type:
        with pytest.raises(gp.errors.WorkersDiffer, match="process 0 divides by 1, process 1 divides by 2. Otherwise"):
            trainer.step(store.rank + 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gp.errors.InexactUpdate)
        for _ in range(2):
            with autograd.record():
                loss = net[0](nd.ones((1, 1))) + (net[1](nd.ones((1, 1))) if store.rank == 0 else 0)
            loss.backward()
            trainer.step(1, ignore_stale_grad=True)
            nd.waitall()
    texts = [str(warning.message) for warning in caught if warning.category is gp.errors.InexactUpdate]
    assert len(texts) == (store.rank == 1 and "async" not in store.type), texts
    assert all("servers of 'dist_sync' update it all the same" in text for text in texts), texts
    store._barrier()
    values = [nd.zeros((1, 1)) for _ in range(2)]
    store.pull([0, 1], out=values)
    np.testing.assert_array_equal([value.asscalar() for value in values], [-1, 0])  # 1 - 2 steps x 0.5 x processes
    print(f"passed on {store.rank}", flush=True)


if __name__ == "__main__":
    main()
