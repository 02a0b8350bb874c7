"""Named arrays and the facts about them, in one file that is never half written and never silently damaged.

The file is what ``numpy.load`` calls an ``.npz``, a zip of plain arrays, so it can be looked into without this package
and nothing in it is ever executed (there is no pickle). The zip's comment is the SHA-256 of everything before it.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
import uuid
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from .bounds import shown
from .errors import CheckpointError, NotFinite, OutputUnavailable

VERSION = 1
_FACTS = "facts.json"
_PARTIAL = re.compile(r"\..+\.[0-9a-f]{32}\.part")  # name of a file that is being written
_DIGEST_LENGTH = 64  # hexadecimal digits of SHA-256
_OTHER_FILES = {  # by their first bytes
    bytes([0x12, 1, 0, 0, 0, 0, 0, 0]): "a file of net.save_parameters, no checkpoint: write net.load_parameters({!r})",
    b"\x80": "a pickle, as trainer.save_states writes, no checkpoint. It is not read, for it can run any program. Save "
    "net and trainer with gp.checkpoint.save",
}
_BUILD_THE_SAME = "Build the net with the arguments that it was trained with"


class Archive(NamedTuple):
    """What a file holds."""

    arrays: dict[str, np.ndarray]
    facts: dict[str, Any]


@contextlib.contextmanager
def writable(what: str, remedy: str = "Free space there, or choose another folder") -> Iterator[None]:
    """Within this block, an OSError is raised as OutputUnavailable, which names `what`, the cause and the `remedy`."""
    try:
        yield
    except OutputUnavailable:  # of a block within this one, which knows the file
        raise
    except OSError as error:
        raise OutputUnavailable(f"{what} cannot be written: {error.strerror or error}. {remedy}") from error


def replace(path: Union[str, os.PathLike], content: Any) -> None:
    """Put what ``content(file)`` writes at `path`, in one piece: a reader finds the old file or the new one.

    A crash, a full disk or an exception in `content` leaves the old file as it was and no other behind; what a killed
    process leaves is removed by the next write into the folder.

    Raises:
        OutputUnavailable: the file cannot be written.
    """
    path = Path(path)
    with writable(str(path)):
        _remove_abandoned_files(path.parent)
        with _partial_file(path) as file:
            content(file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        # The new name itself must survive a power cut, too.
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _partial_file(path: Path) -> Iterator[Any]:
    """A new file beside `path`, which is removed if the block raises; locked as long as this process writes it."""
    while True:
        with open(path.with_name(f".{path.name}.{uuid.uuid4().hex}.part"), "x+b") as file:
            with contextlib.suppress(OSError):  # of a file system without locks, where nothing is removed either
                fcntl.flock(file, fcntl.LOCK_EX)
            if not os.path.exists(file.name):  # removed by another process before it was locked
                continue
            try:
                yield file
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
            return


def _remove_abandoned_files(folder: Path) -> None:
    """Remove what killed processes have left of their writes: files that nobody has locked."""
    for name in filter(_PARTIAL.fullmatch, os.listdir(folder)):
        with contextlib.suppress(OSError), open(folder / name, "r+b") as file:  # locked, or removed meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(file.name)


def sha256_of(file: Any, length: float = math.inf) -> str:
    """The checksum of the first `length` bytes of an open file, or of all."""
    file.seek(0)
    sha = hashlib.sha256()
    while length > 0 and (block := file.read(int(min(length, 1 << 20)))):
        sha.update(block)
        length -= len(block)
    return sha.hexdigest()


def write(path: Union[str, os.PathLike], arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
    """Write `arrays` and `facts` to one file, atomically.

    Args:
        path: the file; one that is there is replaced in one piece.
        arrays: NumPy arrays by name.
        facts: anything that JSON can hold.

    Raises:
        NotFinite: an array has a value that is NaN or infinite, and would be worth nothing; the old file stays.
        OutputUnavailable: the file cannot be written; the old file stays.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "a.npz"
        >>> write(path, {"weight": np.arange(3)}, {"epoch": 7})
        >>> read(path)
        Archive(arrays={'weight': array([0, 1, 2])}, facts={'epoch': 7})
    """

    for name, array in arrays.items():
        if np.asarray(array).dtype.kind == "f" and not np.isfinite(array).all():
            raise NotFinite(f"{name} has a value that is NaN or infinite; {path} was not written")

    def content(file: Any) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(_FACTS, json.dumps({"version": VERSION, "facts": dict(facts)}))
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
            archive.comment = b"0" * _DIGEST_LENGTH
        end = file.seek(0, os.SEEK_END) - _DIGEST_LENGTH
        digest = sha256_of(file, end)
        file.seek(end)
        file.write(digest.encode())

    replace(path, content)


def read(path: Union[str, os.PathLike]) -> Archive:
    """Read a file of :func:`write`.

    Raises:
        CheckpointError: there is no such file, it is damaged, or MXNet or a newer version of this package wrote it.
    """
    try:
        with open(path, "rb") as file:
            begin = file.read(8)
            for start, kind in _OTHER_FILES.items():
                if begin.startswith(start):
                    raise CheckpointError(f"{path} is {kind.format(str(path))}")
            end = file.seek(0, os.SEEK_END) - _DIGEST_LENGTH
            if end < 0:
                raise CheckpointError(f"{path} is damaged: it has {end + _DIGEST_LENGTH} bytes, which is too short")
            digest = sha256_of(file, end)
            if file.read(_DIGEST_LENGTH) != digest.encode():
                raise CheckpointError(f"{path} is damaged, or no checkpoint: its SHA-256 is not the one at its end")
            with zipfile.ZipFile(file) as opened:
                header = json.loads(opened.read(_FACTS))
                if (version := header["version"]) != VERSION:
                    raise CheckpointError(
                        f"{path} has format {shown(version)}, expected {VERSION}: use the gluon_parallel that wrote it"
                    )
                facts = dict(header["facts"])
                members = [member for member in opened.infolist() if member.filename != _FACTS]
                arrays = {member.filename[: -len(".npy")]: _read_array(opened, member) for member in members}
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # of json, zipfile and NumPy, which say nothing about what they raise for nonsense
        kind = type(error).__name__
        raise CheckpointError(f"{path} is damaged, or no checkpoint: what is in it cannot be read ({kind})") from error
    return Archive(arrays, facts)


def _read_array(opened: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    if member.compress_type != zipfile.ZIP_STORED:  # what is compressed may be of any size
        raise ValueError(f"{member.filename} is compressed")
    with opened.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def is_archive(path: Any) -> bool:
    """Whether this is the name of a file that has the form of those that :func:`write` makes."""
    if not isinstance(path, (str, os.PathLike)) or not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as file:
            return _FACTS in file.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError):  # nonsense that ends like a zip
        return False


def described(array: Any, shape: Optional[tuple[int, ...]] = None) -> str:
    """Type and shape in words."""
    return f"{np.dtype(array.dtype).name} {tuple(array.shape if shape is None else shape)}"


def refuse_differences(
    wanted: dict[str, str], saved: dict[str, list[Any]], what: str, remedy: str = _BUILD_THE_SAME
) -> None:
    """CheckpointError if the saved arrays are not :func:`described` as wanted, by name; names the first three."""
    lines = [f"{name} is not in the checkpoint" for name in wanted if name not in saved]
    lines += [f"{name} is only in the checkpoint" for name in saved if name not in wanted]
    kinds = [(name, described(saved[name][0]), kind) for name, kind in wanted.items() if name in saved]
    lines += [f"{name} is {kind} in the checkpoint and {here} here" for name, kind, here in kinds if kind != here]
    if lines:
        more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise CheckpointError(f"{what}: {'; '.join(lines[:3])}{more}. {remedy}")
