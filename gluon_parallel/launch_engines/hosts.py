"""Hosts of a group: which are named, how many processes each takes, and the launcher's own address."""

import contextlib
import functools
import ipaddress
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from .. import bounds
from ..errors import LaunchError

_FORM = "wanted h1:2,h2:2 (host:processes; without a number one process; an IPv6 address stands in brackets)"


class Host(NamedTuple):
    """A host, and how many workers it takes."""

    name: str
    slots: int


LOOPBACK = "127.0.0.1"


def parse(text: str) -> list[Host]:
    """The hosts in ``"h1:2,h2:2"``; LaunchError: it cannot be read, or a host is named twice.

    Example:
        >>> parse("h1:2,h2")
        [Host(name='h1', slots=2), Host(name='h2', slots=1)]
    """
    found = []
    for word in text.split(","):
        match = re.fullmatch(r"\s*(?:\[([0-9A-Fa-f:.]+)\]|(\w[\w.-]*))(?::(\d+))?\s*", word)
        name = "" if match is None else match.group(1) or match.group(2)
        if match is None or not _is_name(name) or not (match.group(3) or "1").strip("0"):
            raise LaunchError(f"hosts: cannot read {bounds.shown(word)} in {bounds.shown(text)}; {_FORM}")
        slots = bounds.whole(f"hosts: the processes of {name}", match.group(3) or 1, 1, bounds.PROCESSES, LaunchError)
        found.append(Host(name, slots))
    _refuse_repeated(found, repr(text))
    return found


def _is_name(text: str) -> bool:
    """Whether a host can be looked up by that name: no label between its dots is empty or too long."""
    try:
        text.encode("idna")
    except UnicodeError:
        return False
    return True


def read_file(path: str) -> list[Host]:
    """The hosts in a file: one per line as ``h1:2`` or, as MPI writes it, ``h1 slots=2``; ``#`` begins a comment."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"hostfile {path}: cannot be read: {error}") from error
    return read_text(text, f"hostfile {path}")


def read_text(text: str, where: str) -> list[Host]:
    """The hosts in lines as a hostfile has them; LaunchError, which names `where` they stand: they cannot be read."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if words:
            try:
                found += parse(re.sub(r"\s+(?:max_)?slots\s*=\s*", ":", words))
            except LaunchError as error:
                raise LaunchError(f"{where}, line {number}: {error}") from error
    if not found:
        raise LaunchError(f"{where}: no host is in it; wanted one per line, such as `h1 slots=2`")
    _refuse_repeated(found, where)
    return found


def _refuse_repeated(hosts: Sequence[Host], where: str) -> None:
    names = [host.name for host in hosts]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise LaunchError(f"hosts: {', '.join(repeated)} more than once in {where}; name each once, as in h1:4")


def alike(names: Sequence[str]) -> bool:
    """Whether two of these names are equal up to their first dot, or some are addresses, behind which such may be.

    Example:
        >>> alike(["gpu.a.org", "gpu.b.org"]), alike(["10.0.0.1", "cpu.a.org"]), alike(["gpu.a.org", "cpu.a.org"])
        (True, True, False)
    """
    labels = {name.partition(".")[0].lower() for name in names if not re.fullmatch(r"[\d.]+|.*:.*", name)}
    return len(labels) < len(names)


@functools.cache  # a name server may take seconds for each answer
def is_local(name: str) -> bool:
    """Whether a host's name means the machine that this process runs on; as it was when first asked.

    Example:
        >>> is_local("localhost"), is_local("203.0.113.1")
        (True, False)
    """
    if name in ("localhost", LOOPBACK, "::1", socket.gethostname()):
        return True
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # only an address of this machine can be bound to
                return True
    return False


def own_address(hosts: Sequence[Host], others_may_come: bool = False) -> str:
    """The address of this machine at which all `hosts` find it: loopback unless one of them is another machine.

    Where others may come, it is that by which the list names this machine.
    """
    for host in hosts:
        is_other = not is_local(host.name)
        if is_other or (others_may_come and host.name != "localhost"):
            try:
                family, kind, protocol, _, address = socket.getaddrinfo(host.name, 9, type=socket.SOCK_DGRAM)[0]
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)  # nothing is sent; the system only chooses the interface
                    found = str(probe.getsockname()[0] if is_other else address[0])
            except OSError as error:
                raise LaunchError(f"hosts: {host.name} cannot be reached from here: {error}") from error
            if is_other or not ipaddress.ip_address(found).is_loopback:  # as that of its own name is on Debian
                return found
    return LOOPBACK


def check_num_workers(num_workers: Optional[int], hosts: Sequence[Host]) -> int:
    """How many workers there are: what was said, or else all that the hosts take."""
    slots = sum(host.slots for host in hosts)
    if num_workers is None and not hosts:
        raise LaunchError("-n is missing: say how many processes to start, as in -n 2")
    if num_workers is None:
        return bounds.whole("hosts: the number of all processes", slots, 1, bounds.PROCESSES, LaunchError)
    bounds.whole("-n", num_workers, 1, bounds.PROCESSES, LaunchError)
    if hosts and num_workers > slots:
        taken = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(f"-n is {num_workers}, but the hosts take {slots}: {taken}. Name more, as in h1:4")
    return num_workers


def place(num_workers: int, hosts: Sequence[Host]) -> list[tuple[str, int]]:
    """Rank by rank its host and its number on that host; hosts are filled in the order in which they were named.

    Example:
        >>> place(3, [Host("h1", 2), Host("h2", 2)])
        [('h1', 0), ('h1', 1), ('h2', 0)]
    """
    places = [(host.name, slot) for host in hosts or [Host("localhost", num_workers)] for slot in range(host.slots)]
    return places[:num_workers]
