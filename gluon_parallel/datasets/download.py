"""Download of a published file from the first mirror that delivers it; continues an interrupted one."""

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path
from urllib.parse import urlsplit

from tqdm import tqdm

from ..archive import sha256_of
from ..compat.deferred import Deferred
from ..errors import DatasetUnavailable
from .published import RemoteFile

requests, urllib3 = Deferred("requests"), Deferred("urllib3")

_TIMEOUT = (10, 30)  # seconds until a server answers, and between two pieces of what it sends
_ATTEMPTS = 5  # per mirror, as long as each brings the file forward
_PATIENCE = 300  # seconds without a new byte, after which another process's download counts as dead
_CHUNK = 1 << 16


class _Failed(Exception):
    """One mirror did not deliver; the text says why in a few words."""


def fetch(file: RemoteFile, folder: Path, timeout=_TIMEOUT) -> Path:
    """Download `file` into `folder`; under its name it appears only when it is whole and its checksum is right.

    What has arrived is kept in ``<name>.part``, so that the next call goes on from there, on any mirror. Processes that
    want the same file at the same time download it once. `timeout` is in seconds, to connect and for each piece.

    Raises:
        DatasetUnavailable: no mirror delivered it; gives each one's reason.
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / file.name, folder / f"{file.name}.part"
    reasons = []
    with _one_process_at_a_time(folder / f".{file.name}.lock", part):
        if path.exists():
            return path  # another process brought it while this one waited
        for url in file.urls:
            try:
                _fetch_from(url, part, file.sha256, timeout)
            except _Failed as failure:
                reasons.append(f"{urlsplit(url).hostname}: {failure}")
            else:
                os.replace(part, path)
                return path
    raise DatasetUnavailable("; ".join(reasons))


def _fetch_from(url, part, sha256, timeout) -> None:
    """Complete `part` from one mirror, or raise _Failed."""
    for _attempt in range(_ATTEMPTS):
        before = _size(part)
        try:
            _transfer(url, part, timeout)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            if _size(part) > before:
                continue  # it broke off, but brought something: go on from there
            raise _Failed(_in_a_few_words(error)) from error
        with open(part, "rb") as file:
            if sha256_of(file) == sha256:
                return
        part.unlink()
        if before == 0:
            raise _Failed("wrong checksum")
        # The beginning may have been another mirror's, and wrong: once more, all of it from this one.
    raise _Failed(f"broke off {_ATTEMPTS} times")


def _transfer(url, part, timeout) -> None:
    """Append to `part` what it lacks, or write it anew where the server cannot continue."""
    have = _size(part)
    headers = {"Accept-Encoding": "identity"}  # the bytes of the file itself: the checksum and ranges are of these
    if have:
        headers["Range"] = f"bytes={have}-"
    with requests.get(url, headers=headers, timeout=timeout, stream=True) as response:
        if have and response.status_code == requests.codes.requested_range_not_satisfiable:
            return  # nothing follows what is here: it is whole, or another file; the checksum tells
        response.raise_for_status()
        if response.status_code != requests.codes.partial_content:
            have = 0  # it ignores ranges and sends everything; should it send another range, the checksum tells
        length = response.headers.get("Content-Length")
        total = have + int(length) if length and length.isdecimal() else None
        with open(part, "ab" if have else "wb") as out:
            # disable=None: silent when not a terminal
            with tqdm.wrapattr(out, "write", total, desc=part.stem, initial=have, disable=None) as counted:
                shutil.copyfileobj(response.raw, counted, _CHUNK)  # raises if fewer bytes come than promised
            out.flush()
            os.fsync(out.fileno())  # before the rename: a power cut must not leave an empty file under the good name


@contextlib.contextmanager
def _one_process_at_a_time(lock, part):
    """Hold `lock`; a process that waits for it gives up when `part` has stopped growing for _PATIENCE seconds."""
    with open(lock, "w") as file:
        size, since = -1, time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system frees it when its process ends
                break
            except BlockingIOError:
                if _size(part) != size:
                    size, since = _size(part), time.monotonic()
                if time.monotonic() - since > _PATIENCE:
                    raise DatasetUnavailable(
                        f"another process holds {lock} and has downloaded nothing for {_PATIENCE} s; end that process"
                    ) from None
                time.sleep(0.1)
        yield


def _size(path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _in_a_few_words(error) -> str:
    """The reason without the chain of nested exceptions that requests prints."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"HTTP {error.response.status_code}"
    if isinstance(error, (requests.Timeout, urllib3.exceptions.TimeoutError)):
        return "timed out"
    if isinstance(error, urllib3.exceptions.HTTPError):  # raised while the content arrives
        return "broke off"
    return "no connection" if isinstance(error, requests.ConnectionError) else type(error).__name__
