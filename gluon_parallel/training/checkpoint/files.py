"""Checkpoint files of any training loop: state of net and trainer, and values of the caller's own."""

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional, Protocol, Union, runtime_checkable

import numpy as np

from ... import archive
from ...archive import Archive
from ...errors import CheckpointError, NotFinite
from ...kvstore import collective, together
from ...kvstore.clients import opened_store
from ...kvstore.contract import contract, is_distributed
from ...metrics import gather_rows
from ...mxnet.compat import mx
from ...mxnet.trainers import store_of
from . import forms
from .state import checked, state

_OWN, _OBJECTS = "own/", "objects/"


def load_arrays(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """MXNet's ``mx.nd.load``, on which ``net.load_parameters`` builds; says how a checkpoint is loaded."""
    try:
        return load(*args, **kwargs)
    except mx.base.MXNetError:
        (file,) = (*args, *kwargs.values())  # `fname` in mx.nd, and `file` in mx.npx
        if not archive.is_archive(file):
            raise
    call = f"gp.checkpoint.load({str(file)!r}, net)"
    raise CheckpointError(f"{file} is no file of net.save_parameters; a checkpoint is loaded by {call}")


def load_states(load: Callable[..., None], trainer: mx.gluon.Trainer, fname: Any) -> None:
    """``gluon.Trainer.load_states``; says how a checkpoint is loaded."""
    if archive.is_archive(fname):
        call = f"gp.checkpoint.load({str(fname)!r}, net, trainer)"
        raise CheckpointError(f"{fname} is no file of trainer.save_states; a checkpoint is loaded by {call}")
    load(trainer, fname)


@runtime_checkable
class Stateful(Protocol):
    """What has a state of its own that belongs into a checkpoint, such as an average of weights."""

    def state(self) -> Archive:
        """Its state, to be written."""

    def restore(self, archive: Archive, source: str) -> None:
        """Take over a state; CheckpointError: it does not fit."""


def save(
    path: Union[str, os.PathLike], net: mx.gluon.Block, trainer: Optional[mx.gluon.Trainer] = None, **own: Any
) -> Path:
    """Write the state of a net and its trainer to a file, in one piece: a crash leaves the old file as it was.

    Of several processes that share a trainer's store, call it on all; process 0 writes.

    Args:
        path: the file; folders are made as needed.
        net: an initialized net.
        trainer: its trainer, whose optimizer, learning rate and scheduler are saved along.
        own: what the loop has to know when it continues, such as ``epoch=3, best=0.98``: what JSON can hold (tuples
            become lists), NumPy arrays and NDArrays; and an :class:`.ExponentialMovingAverage`.

    Raises:
        CheckpointError: as of :func:`state`; or a value of `own` cannot be written.
        NotFinite: an array has a value that is NaN or infinite; the old file stays.
        OutputUnavailable: the file cannot be written.

    Example:
        >>> import tempfile
        >>> net = mx.gluon.nn.Dense(1, in_units=2)
        >>> net.initialize()
        >>> path = save(tempfile.mkdtemp() + "/checkpoint.npz", net, epoch=3)
        >>> load(path, net)
        {'epoch': 3}
    """
    store = contract(store_of(trainer) if isinstance(trainer, mx.gluon.Trainer) else None)

    def save() -> Path:
        write(Path(path), net, trainer, own, writes=store.rank == 0)
        return Path(path)

    try:
        return together(store, save)
    except NotFinite as error:
        stays = "the one from before is as it was" if Path(path).exists() else "there is none from before"
        raise NotFinite(f"{error}; {stays}") from error


def write(path: Path, net: Optional[mx.gluon.Block], trainer: Optional[mx.gluon.Trainer], own: Mapping[str, Any],
          loop: Optional[dict[str, Any]] = None, writes: bool = True) -> None:  # fmt: skip
    """As :func:`save`, also without a net, with the position of a :class:`.Loop`, and only if this process `writes`."""
    objects = {name: value.state() for name, value in own.items() if isinstance(value, Stateful)}
    values, arrays = _split({name: value for name, value in own.items() if name not in objects})
    for name, content in objects.items():
        arrays.update({f"{_OBJECTS}{name}/{key}": array for key, array in content.arrays.items()})
    facts = {"own": values, "objects": {name: content.facts for name, content in objects.items()}}
    saved = Archive({}, {}) if net is None else state(net, trainer, keeps_optimizer=writes)
    if not writes:
        return
    with archive.writable(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        archive.write(path, {**saved.arrays, **arrays}, {"state": saved.facts, **facts, "loop": loop})


def load(
    path: Union[str, os.PathLike], net: mx.gluon.Block, trainer: Optional[mx.gluon.Trainer] = None, **objects: Stateful
) -> dict[str, Any]:
    """Put what :func:`save` wrote, or a run's checkpoint, back into a net of the same architecture and its trainer.

    Of several processes, call it on all, with the same file. With a trainer they wait for process 0, which may still be
    writing it; without one, meet in some other way after :func:`save`.

    Args:
        path: the file.
        net, trainer: as of :func:`restore`.
        objects: an :class:`.ExponentialMovingAverage` that was saved under this name, to be restored.

    Returns:
        The values that were saved beside net and trainer: ``{"epoch": 3}``; of a loop's checkpoint, also its epoch.

    Raises:
        CheckpointError: there is no such file, it is damaged, processes read different ones, it holds no such object,
            or as of :func:`restore`.
    """
    return put(read(Path(path), opened_store(trainer)), net, trainer, objects, str(path))


def put(content: Archive, net: Optional[mx.gluon.Block], trainer: Optional[mx.gluon.Trainer],
        objects: Mapping[str, Stateful], path: str) -> dict[str, Any]:  # fmt: skip
    """As :func:`load`, from the content of the file at `path`."""
    arrays, facts = content
    if "state" not in facts:
        there = ", ".join(facts) or "nothing"
        raise CheckpointError(f"{path} holds {there}, no state of a net and its trainer; read it with gp.archive.read")
    own = {"epoch": facts["loop"]["epoch"], **facts["own"]} if facts.get("loop") else dict(facts.get("own", {}))
    own.update(arrays_of(content))
    states = {name: _state_of(name, value, arrays, facts, path) for name, value in objects.items()}
    fill = None if net is None else checked(Archive(arrays, facts["state"]), net, trainer, path)
    for name, value in states.items():
        objects[name].restore(value, source=path)
    if fill is not None:  # last, for the others refuse what does not fit
        fill()
    return own


def arrays_of(content: Archive) -> dict[str, np.ndarray]:
    """The arrays that were saved beside net and trainer, by the caller's names."""
    return {name[len(_OWN) :]: array for name, array in content.arrays.items() if name.startswith(_OWN)}


def _state_of(name: str, value: Any, arrays: dict[str, np.ndarray], facts: dict[str, Any], path: Any) -> Archive:
    """The state of one of the objects that were saved."""
    saved, kind = facts.get("objects", {}), type(value).__name__
    if not isinstance(value, Stateful):
        raise CheckpointError(f"{name}: got a {kind}, expected an object such as gp.ExponentialMovingAverage")
    if name not in saved:
        there = f"those that it has: {', '.join(saved)}" if saved else "it has no such objects"
        raise CheckpointError(f"{path} holds no {name!r} ({there}). Leave it out to load the rest")
    prefix = f"{_OBJECTS}{name}/"
    own = {key[len(prefix) :]: array for key, array in arrays.items() if key.startswith(prefix)}
    return Archive(own, saved[name])


def read(path: Path, store: Any, may_be_missing: bool = False) -> Any:
    """The file's content, the same for all processes of the store, if there is one; None: no process sees the file."""
    return together(store, lambda: _read(path, store, may_be_missing))


def _read(path: Path, store: Any, may_be_missing: bool) -> Any:
    alone = not is_distributed(store)
    with contextlib.nullcontext() if alone else collective("gp.checkpoint.load()"):
        if not alone:
            gather_rows(np.zeros((1, 1)), store)  # process 0 comes here when it has written what it saves
        found, digest, failure = None, -1, None
        try:
            if not may_be_missing or path.exists():
                found, digest = archive.read(path), zlib.crc32(path.read_bytes())
                forms.check(found.facts, forms.CHECKPOINT, str(path))
        except Exception as error:  # the others wait for what follows
            digest, failure = -2, error
        digests = gather_rows(np.array([[float(digest)]]), store)[:, 0] if not alone else []
    if failure is not None:
        raise failure
    if others := [rank for rank, one in enumerate(digests) if one != digest]:
        names = ", ".join(map(str, others))
        raise CheckpointError(f"{path} is another file for process {names}, or none; put it where all hosts find it")
    return found


def _split(own: dict[str, Any]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The values that JSON holds, and those that are arrays."""
    values, arrays = {}, {}
    for name, value in own.items():
        if isinstance(value, (mx.nd.NDArray, np.ndarray)):
            arrays[_OWN + name] = np.asarray(value.asnumpy() if isinstance(value, mx.nd.NDArray) else value)
            continue
        try:
            values[name] = json.loads(json.dumps(value.item() if isinstance(value, np.generic) else value))
        except (TypeError, ValueError) as error:
            wanted = "wanted numbers, words, lists and dicts of them, or arrays"
            raise CheckpointError(f"the value {name}={value!r} cannot be saved: {error}; {wanted}") from error
    return values, arrays
