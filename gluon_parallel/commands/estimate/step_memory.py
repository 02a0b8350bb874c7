"""Memory of a training step on one device, from the shapes of a traced net and from what its gradients need."""

from __future__ import annotations

import collections
import warnings
from typing import NamedTuple

import numpy as np

from ...compat import mx
from ...compat.array_types import leaves
from ...data_parallel.shards import is_elementwise, parts
from ...errors import ConfigError
from ...kvstore.mpi.shared_memory.parts import ROW
from ...kvstore.mpi.shared_memory.rows import DTYPES, PARTS, TWICE
from ...native.records import C
from .net import backward_of

_ROW_NUMBER = 8  # bytes of an int64


class Memory(NamedTuple):
    """Bytes on one device."""

    parameters: int  # running statistics too
    gradients: int
    optimizer: int
    inputs: int
    kept: int  # what the forward pass leaves for the backward pass
    activations: int  # the most at one time of activations and their gradients, `kept` included

    @property
    def total(self):
        """The most at one time."""
        return sum(self) - self.kept


def trained(nodes, net):
    """The variables whose gradient a trainer of `net` exchanges, as numbers of nodes."""
    parameters = net.collect_params()
    return [
        number
        for number, node in enumerate(nodes)
        if node.op == "null" and node.name in parameters and parameters[node.name].grad_req != "null"
    ]


def words_of_batch(nodes, net):
    """{trained variable with a row_sparse gradient: how many words a device looks up in it, each with a row}."""
    parameters, words = net.collect_params(), {}
    sparse = [number for number in trained(nodes, net) if parameters[nodes[number].name]._grad_stype == "row_sparse"]
    for number in sparse:
        looked_up = [node.inputs[0] for node in nodes if (number, 0) in node.inputs]  # by each layer with this weight
        words[number] = sum(int(np.prod(nodes[source].shapes[output])) for source, output in looked_up)
    return words


def bytes_of_rows(node, words):
    """Bytes of the row_sparse gradient of a variable, if all words differ: of each row its values, and its number."""
    rows = node.shapes[0][0]
    return min(rows, words) * (node.sizes[0] // rows + _ROW_NUMBER)


def memory_of(nodes, net, optimizer, owners=1, replicas=1):
    """The :class:`Memory` of a hybridized net.

    Args:
        nodes: the traced net.
        net: for which parameters have gradients.
        optimizer: an ``mx.optimizer.Optimizer``.
        owners: devices that have a part of its state each; counted is the largest part.
        replicas: devices of all processes together, whose words have rows in the sum of a row_sparse gradient.
    """
    weights, words = trained(nodes, net), words_of_batch(nodes, net)
    is_parameter = [node.op == "null" and node.name in net.collect_params() for node in nodes]
    parameters = sum(sum(node.sizes) for node, mine in zip(nodes, is_parameter) if mine)
    gradients = sum(
        bytes_of_rows(nodes[number], replicas * words[number]) if number in words else sum(nodes[number].sizes)
        for number in weights
    )
    sizes = [int(np.prod(nodes[number].shapes[0])) for number in weights]
    of_value = np.array([_state_bytes(optimizer, nodes[number].dtypes[0]) for number in weights])
    bounds = np.reshape(parts(sizes, owners, whole=not is_elementwise(optimizer)), (len(sizes), owners + 1))
    states = int((of_value @ np.diff(bounds, axis=1)).max())
    inputs = sum(sum(node.sizes) for node, mine in zip(nodes, is_parameter) if node.op == "null" and not mine)
    kept, most = _activations(nodes, weights)
    return Memory(parameters, gradients, states, inputs, kept, most)


def shared_rows(nodes, weights, sharded):
    """Bytes per process of the memory in which those of one host exchange these gradients over the store mpi."""
    sizes: collections.Counter = collections.Counter()  # number of a dtype -> bytes
    for number in weights:
        size = nodes[number].sizes[0]
        dtype = np.dtype(nodes[number].dtypes[0])
        row = size if sharded or dtype.itemsize > 2 else 2 * size  # of halves it is float32
        sizes[dtype] += row if sharded or row > TWICE else 2 * row
    taken = PARTS if sharded else DTYPES
    return sum(2 * min(size, ROW) if sharded else size for dtype, size in sizes.items() if dtype in taken)


def given_back(nodes, weights, optimizer, processes):
    """Bytes of these gradients that a process of one host gives back, as others own them: of that with the fewest.

    An upper bound: only whole pages are given back.
    """
    sizes = [int(np.prod(nodes[number].shapes[0])) for number in weights]
    dtypes = [np.dtype(nodes[number].dtypes[0]) for number in weights]
    bounds = np.reshape(parts(sizes, processes, whole=not is_elementwise(optimizer)), (len(sizes), processes + 1))
    scale = np.array([dtype.itemsize if dtype in PARTS else 0 for dtype in dtypes])[:, None]
    before, behind = bounds[:, :-1] * scale, (bounds[:, -1:] - bounds[:, 1:]) * scale
    of_process = [np.where(size >= C.WORTH, size, 0).sum(axis=0) for size in (before, behind)]
    return int(np.sum(of_process, axis=0).min())


def temporary(nodes, kind, devices):
    """Bytes of a process's temporary buffers, which MXNet keeps. On GPUs, cuDNN takes what it likes: 0.

    oneDNN lays the weights of convolutions out anew, and their gradients back. MXNet has 4 such buffers per thread that
    launches operators; two of these per device and one more were measured with DataParallel. For recurrent layers,
    oneDNN has memory of its own, which MXNet does not count.
    """
    if kind != "cpu":
        return 0
    convolved = [2 * nodes[node.inputs[1][0]].sizes[0] for node in nodes if node.op == "Convolution"]
    recurrent = sum(_recurrent(node) for node in nodes if node.op == "RNN")
    return 4 * (1 + 2 * devices) * max(convolved, default=0) + devices * recurrent


_GATES = {"lstm": 4, "gru": 3}


def _recurrent(node):
    """Bytes that oneDNN takes for the layers of an RNN operator.

    Measured as the growth of a process for 1 to 3 layers of LSTM, GRU and RNN, one of them in both directions: for each
    value of the output, 5 values and for each layer 1 and 2 for each of its gates.
    """
    gates = _GATES.get(node.attrs["mode"], 1)
    return node.sizes[0] * (5 + int(node.attrs["num_layers"]) * (1 + 2 * gates))


def make_optimizer(name):
    """MXNet's optimizer of that name, with its usual arguments; for momentum, ``sgd`` has some."""
    try:
        return mx.optimizer.create(name, **({"momentum": 0.9} if name.lower() in ("sgd", "nag") else {}))
    except (ValueError, TypeError) as error:
        known = ", ".join(sorted(mx.optimizer.Optimizer.opt_registry))
        raise ConfigError(f"--optimizer is {name!r}; expected one of {known}") from error


def _state_bytes(optimizer, dtype):
    """Bytes of the optimizer's state per value of a weight."""
    weight = mx.nd.zeros((8,), dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about training in float16
        try:
            state = optimizer.create_state_multi_precision(0, weight)
        except AssertionError as error:  # groupadagrad, whose state is a number per row of a matrix
            name = type(optimizer).__name__
            raise ConfigError(f"--optimizer {name}: its state depends on the weights' shapes; not estimated") from error
    arrays = [one for _, one in leaves(state) if one is not None]
    return sum(one.size * np.dtype(one.dtype).itemsize for one in arrays) / weight.size


class _Alive:
    """Bytes that are allocated, and the most there ever were."""

    bytes = most = 0

    def add(self, size):
        self.bytes += size
        self.most = max(self.most, self.bytes)


def _activations(nodes, weights):
    """(bytes that the forward pass keeps, the most at one time): both passes, array by array."""
    backward = [backward_of(node) for node in nodes]
    needs = _need_gradients(nodes, weights)
    readers: collections.Counter = collections.Counter()  # entry -> how many backward passes read it
    for number, node in enumerate(nodes):
        if needs[number]:
            read = {node.inputs[position] for position in backward[number].inputs}
            readers.update(read | {(number, output) for output in backward[number].outputs})
    alive = _Alive()
    kept = _forward(nodes, readers, alive)
    gradients: dict = {}  # entry -> the arrays whose sum its gradient is
    users: collections.Counter = collections.Counter()  # array -> who needs it
    heads = {(number, 0) for number, node in enumerate(nodes) if node.op != "null"}
    heads -= {entry for node in nodes for entry in node.inputs}
    sizes: list = []

    def give(entry, array):
        gradients.setdefault(entry, []).append(array)
        users[array] += 1

    def make(entry):
        sizes.append(nodes[entry[0]].sizes[entry[1]])
        alive.add(sizes[-1])
        give(entry, len(sizes) - 1)

    for entry in heads:
        make(entry)
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        if node.op == "null" or not needs[number]:
            continue
        arrays = [array for output in range(len(node.shapes)) for array in gradients.pop((number, output), ())]
        for position, entry in enumerate(node.inputs):
            if nodes[entry[0]].op != "null" and needs[entry[0]]:
                if position in backward[number].new or not arrays:
                    make(entry)
                else:
                    give(entry, arrays[0])  # the gradient passes through
        for array in arrays:
            users[array] -= 1
            if not users[array]:
                alive.add(-sizes[array])
    return kept, alive.most


def _need_gradients(nodes, weights):
    needs = [False] * len(nodes)
    for number in weights:
        needs[number] = True
    for number, node in enumerate(nodes):
        needs[number] = needs[number] or any(needs[source] for source, _ in node.inputs)
    return needs


def _forward(nodes, readers, alive):
    """Run the forward pass; returns the bytes that it keeps."""
    uses = collections.Counter(entry for node in nodes for entry in node.inputs)
    kept = 0
    for number, node in enumerate(nodes):
        if node.op == "null":
            continue
        for output, size in enumerate(node.sizes):
            if readers[number, output] or uses[number, output] or output == 0:
                alive.add(size)
                kept += size if readers[number, output] else 0
        for entry in node.inputs:
            uses[entry] -= 1
            if not uses[entry] and not readers[entry] and nodes[entry[0]].op != "null":
                alive.add(-nodes[entry[0]].sizes[entry[1]])
    return kept
