"""Checkpoint files of any training loop: state of net and trainer, and values of the caller's own."""

import json
import os
import zlib
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np

from ... import archive
from ...archive import Archive
from ...compat import mx
from ...errors import CheckpointError, NotFinite, OutputUnavailable
from ...metrics import gather
from .state import restore, started_store, state

_OWN = "own/"


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
            become lists), NumPy arrays and NDArrays.

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
    path = Path(path)
    values, arrays = _split(own)
    saved = state(net, trainer)
    store = None if trainer is None else trainer._kvstore
    if getattr(store, "rank", 0) != 0:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        archive.write(path, {**saved.arrays, **arrays}, {"state": saved.facts, "own": values})
    except NotFinite as error:
        stays = "the one from before is as it was" if path.exists() else "there is none from before"
        raise NotFinite(f"{error}; {stays}") from error
    except OSError as error:
        raise OutputUnavailable(f"checkpoint {path} cannot be written: {error.strerror or error}") from error
    return path


def load(
    path: Union[str, os.PathLike], net: mx.gluon.Block, trainer: Optional[mx.gluon.Trainer] = None
) -> dict[str, Any]:
    """Put what :func:`save` wrote, or a run's checkpoint, back into a net of the same architecture and its trainer.

    Of several processes, call it on all, with the same file. With a trainer they wait for process 0, which may still be
    writing it; without one, meet in some other way after :func:`save`.

    Args:
        path: the file.
        net, trainer: as of :func:`restore`.

    Returns:
        The values that were saved beside net and trainer: ``{"epoch": 3}``; of a run's checkpoint, its epoch.

    Raises:
        CheckpointError: there is no such file, it is damaged, processes read different ones, or as of :func:`restore`.
    """
    arrays, facts = _read(Path(path), started_store(trainer))
    if "state" not in facts:
        raise CheckpointError(
            f"{path} holds no state of a net and its trainer, but {', '.join(facts) or 'nothing'}; "
            "read it with gp.archive.read"
        )
    own = dict(facts.get("own", {}))
    if "position" in facts:
        own["epoch"] = facts["position"][0]
    own.update({name[len(_OWN) :]: array for name, array in arrays.items() if name.startswith(_OWN)})
    restore(Archive(arrays, facts["state"]), net, trainer, source=str(path))
    return own


def _read(path: Path, store: Any) -> Archive:
    """The file's content, which is the same for all processes of the store, if there is one."""
    if getattr(store, "num_workers", 1) == 1:
        return archive.read(path)
    gather(np.zeros((1, 1)), store)  # process 0 comes here when it has written what it saves
    digest, failure = -1, None
    try:
        found, digest = archive.read(path), zlib.crc32(path.read_bytes())
    except Exception as error:  # the others wait for what follows
        failure = error
    digests = gather(np.array([[float(digest)]]), store)[:, 0]
    if failure is not None:
        raise failure
    if others := [rank for rank, one in enumerate(digests) if one != digest]:
        raise CheckpointError(
            f"{path} is another file for process {', '.join(map(str, others))}, or none; put it into a folder that all "
            "hosts share"
        )
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
            raise CheckpointError(
                f"the value {name}={value!r} cannot be saved: {error}. Wanted numbers, words, lists and dicts of them, "
                "or arrays"
            ) from error
    return values, arrays
