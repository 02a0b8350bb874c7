"""Probe, run by the launcher: exchange arrays of several sizes with the other processes, and time that."""

import json
import statistics
import time

SIZES = {"256 B": (64, 100), "64 KB": (1 << 14, 50), "1 MB": (1 << 18, 20), "16 MB": (1 << 22, 4)}  # values, times


def main():
    """Print the library, and for each size the median of the seconds and whether the sums were right."""
    import numpy as np

    from gluon_parallel import kvstore
    from gluon_parallel.compat import mx

    store = kvstore.create("auto")
    print("@doctor", json.dumps({"processes": store.num_workers, "library": library(store)}), flush=True)
    wanted = store.num_workers * (store.num_workers + 1) / 2
    for key, (name, (size, times)) in enumerate(SIZES.items()):
        array = mx.nd.zeros(size)
        store.broadcast(key, array, [array])
        seconds, right = [], True
        for number in range(times + 2):
            array[:] = store.rank + 1
            array.wait_to_read()
            start = time.perf_counter()
            store.pushpull(key, array)
            array.wait_to_read()
            if number >= 2:  # the first ones agree about the key
                seconds.append(time.perf_counter() - start)
            right = right and bool((array.asnumpy() == np.float32(wanted)).all())
        answer = {"bytes": 4 * size, "seconds": statistics.median(seconds), "right": right}
        print("@doctor", json.dumps({f"size {name}": answer}), flush=True)


def library(store):
    """What carries the store's messages, with its version."""
    if store.type == "mpi":
        from mpi4py import MPI

        from gluon_parallel.kvstore.mpi.startup import progress_engine

        memory = progress_engine().shared
        shared = "sums in shared memory" if memory is not None and memory.num_hosts == 1 else "sums between hosts"
        return f"{MPI.Get_library_version().partition(',')[0].strip()}, {shared}"
    if store.type == "horovod":
        import horovod

        return f"Horovod {horovod.__version__}"
    return "ps-lite, in MXNet"


if __name__ == "__main__":
    main()
