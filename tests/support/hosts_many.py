"""One of many processes: small sums, vectors and a group, without a test framework, whose import takes its time."""

import numpy as np

import gluon_parallel as gp
from mxnet import nd


def main():
    store = gp.kvstore.create("mpi")
    half = gp.kvstore.group(store, range(store.rank % 2, store.num_workers, 2))
    for turn in range(3):
        for made in (store, half):
            arrays = [nd.full((100 + key,), made.rank + key + turn) for key in range(5)]
            made.pushpull(list(range(5)), arrays)
            for key, array in enumerate(arrays):
                wanted = sum(rank + key + turn for rank in range(made.num_workers))
                assert (array.asnumpy() == wanted).all(), (array, wanted)
            rows = made.gather("vector", np.array([made.rank, turn]))
            assert rows.tolist() == [[rank, turn] for rank in range(made.num_workers)]
    print(f"passed on {store.rank} of {store.num_workers}", flush=True)


if __name__ == "__main__":
    main()
