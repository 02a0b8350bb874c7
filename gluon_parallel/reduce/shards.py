"""Sharded optimizer state: every device of every process keeps, and updates with, its part of the optimizer's state."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..kvstore.contract import contract, is_distributed
from ..kvstore.protocols import summing_for
from ..kvstore.trainer_parameters import fix_devices
from ..mxnet.attached import replace_method
from ..mxnet.compat import mx
from ..mxnet.compat.array_types import as_legacy
from ..mxnet.engine import make_plain
from ..mxnet.trainers import parameters_of, store_of, updaters_of
from ..split import map_arrays
from .reducer import Reducer, shard_updates, shards_of

# Those that update each value by itself, so that a part of an array is updated as in the whole one; subclasses may not.
_ELEMENTWISE = {
    "adadelta", "adagrad", "adam", "adamw", "dcasgd", "ftml", "ftrl", "nag", "rmsprop", "sgd", "signum",
}  # fmt: skip
_ALIGNED = 16  # values: where an array is cut
# Values of one owner before it is the next one's turn: sums become ready one after the other, and with short turns
# every owner can update early. Smaller pieces would split the huge pages of gradients that are given back.
_TURN = 1 << 20


def shard(trainer: mx.gluon.Trainer) -> Shards:
    """Divide the optimizer's state of this trainer from now on."""
    shards = shards_of(trainer)
    if shards is None:
        shards = Shards(trainer)
        shard_updates(trainer, shards)
        fix_devices(
            trainer,
            "With shard_optimizer=True each device has a part of the optimizer's state: make the trainer after "
            "reset_ctx, or write a checkpoint before it, and load that into a new trainer",
        )
        for name in ("save_states", "load_states"):
            replace_method(trainer, name, _refuse_files)
    return shards


def _refuse_files(fname: str) -> None:
    raise CheckpointError(
        f"{fname}: with shard_optimizer=True this process has a part of the optimizer's state, and the trainer's own "
        "files would have no more; write gp.checkpoint.save and gp.checkpoint.load, which gather and divide it"
    )


def is_elementwise(optimizer: mx.optimizer.Optimizer) -> bool:
    """Whether it is known that this optimizer updates each value by itself."""
    kind = type(optimizer)
    return kind.__module__.partition(".")[0] in ("mxnet", "gluon_parallel") and kind.__name__.lower() in _ELEMENTWISE


def owner_bounds(sizes: Sequence[int], num: int, whole: bool = False) -> list[list[int]]:
    """Divide arrays of these sizes among `num` owners; (num + 1) bounds for each array.

    Owner k has the values of an array from bounds[k] to bounds[k + 1]. With `whole`, one has all of them.

    Example:
        >>> owner_bounds([4, 40, 4], 2), owner_bounds([4, 40, 4], 2, whole=True)
        ([[0, 4, 4], [0, 16, 40], [0, 0, 4]], [[0, 4, 4], [0, 0, 40], [0, 4, 4]])
    """
    if whole:
        return _whole_bounds(sizes, num)
    found, group = [], []
    for size in sizes:
        group.append(size)
        if sum(group) >= num * _TURN:
            found += _ranges(group, num)
            group = []
    return found + _ranges(group, num)


def _whole_bounds(sizes: Sequence[int], num: int) -> list[list[int]]:
    """Each array for the owner that has the least of those before it."""
    found, owned = [], [0] * num
    for size in sizes:
        owner = owned.index(min(owned))
        owned[owner] += size
        found.append([0] * (owner + 1) + [size] * (num - owner))
    return found


def _ranges(sizes: Sequence[int], num: int) -> list[list[int]]:
    """Owners have ranges of the values of all arrays, one behind the other."""
    total, begin, found = sum(sizes), 0, []
    for size in sizes:
        bounds = [min(max(total * owner // num - begin, 0), size) for owner in range(num + 1)]
        found.append([bound if bound == size else bound - bound % _ALIGNED for bound in bounds])
        begin += size
    return found


def view_of(array: mx.nd.NDArray, begin: int, end: int) -> mx.nd.NDArray:
    """A view of these values of an array in the plain layout; all of them keep their shape."""
    array = as_legacy(array)
    return array if end - begin == array.size else array.reshape((-1,))[begin:end]


class _Piece(NamedTuple):
    """What one device of this process updates of one parameter; views."""

    device: int  # its number
    weight: mx.nd.NDArray
    gradient: mx.nd.NDArray
    copies: list[mx.nd.NDArray]  # of the weight, on other devices


class Shards:
    """The division of one trainer's optimizer state, and the update with it.

    Processes, and in each its devices, own ranges of the trained parameters' values, see :func:`owner_bounds`: one
    piece of a parameter at most, with the parameter's learning rate and count of updates. Where an optimizer might not
    update each value by itself, parameters have one owner each.
    """

    def __init__(self, trainer: mx.gluon.Trainer) -> None:
        self._trainer = trainer
        self._whole = not is_elementwise(trainer.optimizer)
        self._bounds: dict[int, tuple[list[int], list[int]]] = {}  # number -> those of processes, of devices here
        self._reducer: Reducer | None = None  # of the last update
        self._pieces: dict[
            int, list[_Piece]
        ] = {}  # number of a parameter -> its pieces, views of the arrays of `_reducer`
        self.with_state: set[int] = set()  # numbers of parameters of which some owner has a state

    def divide(self, numbers: Iterable[int] = ()) -> None:
        """Give the parameters of these numbers, and those that are trained, owners; on all processes in one order."""
        trained = [number for number, one in enumerate(parameters_of(self._trainer)) if one.grad_req != "null"]
        states = [number for updater in updaters_of(self._trainer) for number in updater.states]
        new = sorted({*numbers, *trained, *states} - self._bounds.keys())
        if not new:
            return
        store = contract(store_of(self._trainer))
        sizes = [parameters_of(self._trainer)[number].list_data()[0].size for number in new]
        processes = owner_bounds(sizes, store.num_workers, self._whole)
        own = [bounds[store.rank + 1] - bounds[store.rank] for bounds in processes]
        devices = owner_bounds(own, len(updaters_of(self._trainer)), self._whole)
        for number, between, within in zip(new, processes, devices):
            self._bounds[number] = between, [between[store.rank] + bound for bound in within]
        for index, updater in enumerate(updaters_of(self._trainer)):  # states from before hold whole arrays
            for number in updater.states.keys() & set(new):
                self.with_state.add(number)
                begin, end = self.owned(number, index)
                held = updater.states.pop(number)
                if begin < end:
                    updater.states[number] = _copied(held, begin, end)

    def owned(self, number: int, device: int) -> tuple[int, int]:
        """Begin and end of the values of a parameter that a device of this process owns."""
        bounds = self._bounds[number][1]
        return bounds[device], bounds[device + 1]

    def sum(self) -> None:
        """Sum the gradients over devices and processes; each process gets the sums of what it owns."""
        self.divide()
        trained = [number for number, one in enumerate(parameters_of(self._trainer)) if one.grad_req != "null"][::-1]
        arrays = [parameters_of(self._trainer)[number].list_grad() for number in trained]
        bounds = [self._bounds[number][0] for number in trained]
        store: Any = contract(store_of(self._trainer))
        with summing_for(store, self._trainer):
            store.reduce_scatter(trained, arrays, bounds)

    def of_devices(self, reducer: Reducer, indices: Sequence[int]) -> list[tuple[list, list, list]]:
        """For each device (numbers of parameters, gradients, weights): what it updates of those at these indices."""
        self.divide()
        if reducer is not self._reducer:
            self._reducer, self._pieces = reducer, {}
        found: list[tuple[list, list, list]] = [([], [], []) for _ in updaters_of(self._trainer)]
        with mx.autograd.pause():
            make_plain(*itertools.chain.from_iterable(reducer.weights[index] for index in indices))
            for index in indices:
                number = reducer.numbers[index]
                self.with_state.add(number)
                if number not in self._pieces:
                    self._pieces[number] = self._pieces_of(number, reducer.weights[index], reducer.gradients[index])
                for device, weight, gradient, _ in self._pieces[number]:
                    for known, one in zip(found[device], (number, gradient, weight)):
                        known.append(one)
        return found

    def share(self, reducer: Reducer, indices: Sequence[int]) -> None:
        """Copy what each device of each process has updated to all others."""
        numbers = [reducer.numbers[index] for index in indices]
        for piece in itertools.chain.from_iterable(self._pieces[number] for number in numbers):
            for copy in piece.copies:
                piece.weight.copyto(copy)
        self.gather(numbers, [reducer.weights[index] for index in indices])

    def gather(self, numbers: Sequence[int], arrays: Sequence[Sequence[mx.nd.NDArray]]) -> None:
        """All-gather arrays that are divided as the parameters of these numbers: every process gets all values.

        `arrays` are a list for each number, of one array per device, of which the first has this process's part.
        """
        if is_distributed(store_of(self._trainer)):
            bounds = [self._bounds[number][0] for number in numbers]
            store_of(self._trainer).gather_shards(numbers, arrays, bounds)

    def _pieces_of(self, number: int, weights: list[mx.nd.NDArray], gradients: list[mx.nd.NDArray]) -> list[_Piece]:
        pieces = []
        # Between processes, the store copies from the first device to the others.
        others = weights[:1] if is_distributed(store_of(self._trainer)) else weights
        for device, (weight, gradient) in enumerate(zip(weights, gradients)):
            begin, end = self.owned(number, device)
            if begin < end:
                arrays = weight, gradient, *(one for other, one in enumerate(others) if other != device)
                weight, gradient, *copies = (view_of(array, begin, end) for array in arrays)
                pieces.append(_Piece(device, weight, gradient, copies))
        return pieces


def _copied(state: Any, begin: int, end: int) -> Any:
    """Copies of the values from `begin` to `end` of every array of an optimizer's state, nested as it is."""
    return map_arrays(lambda array: view_of(array, begin, end).copy(), state)
