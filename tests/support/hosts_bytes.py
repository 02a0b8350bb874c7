"""Prints the bytes that the first of two hosts sends in a step; its word is the type of compression."""

import sys

from hosts_checks import bytes_sent

import gluon_parallel as gp
from mxnet import nd


def sent_in(steps, store, gradients):
    """Sum all gradients so often; the bytes that this host has sent."""
    before = bytes_sent(store)
    for _ in range(steps):
        for key, gradient in enumerate(gradients):
            store.pushpull(key, gradient, priority=-key)
        for gradient in gradients:
            gradient.wait_to_read()
    return bytes_sent(store) - before


if __name__ == "__main__":
    made = gp.kvstore.create("mpi")
    made.set_gradient_compression({"type": sys.argv[1]})
    arrays = [nd.ones((50_000,)) for _ in range(20)]
    sent_in(5, made, arrays)  # in which the keys are agreed upon
    found = sent_in(20, made, arrays)
    if made.rank == 0:
        print("bytes per step", found / 20)
