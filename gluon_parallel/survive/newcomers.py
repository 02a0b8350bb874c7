"""New processes: how those that run hear of one, agree on the step after which they meet it, or refuse it."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from .. import launcher
from ..errors import LOG
from ..forks import end_at_once
from ..kvstore.handshake import version
from ..kvstore.mpi import pmix
from ..mxnet.blocks import parameters_by_structure
from ..mxnet.compat import mx
from ..mxnet.parameters import gradient_storage, waits_for_shape
from ..mxnet.trainers import parameters_of
from ..reduce.step_header import header_of
from . import meeting

_ACCEPTS = 0.2  # seconds after which a new process that waits at its port can be met


class Differs(Exception):
    """A new process trains something else than those that run."""


class Newcomer(NamedTuple):
    """A new process that waits to be met."""

    number: int
    port: str
    host: str
    job: str  # as mpirun calls it; the process is alone in it
    says: dict  # what it trains, see `description`


def description(net: mx.gluon.Block, trainer: mx.gluon.Trainer) -> dict[str, str]:
    """What must be the same in a new process, in words by name."""
    parameters = parameters_by_structure(net)
    found_in = {id(one): name for name, one in reversed([*parameters.items()])}
    numbered = [f"{found_in.get(id(one))} {gradient_storage(one)}" for one in parameters_of(trainer)]
    has_shapes = not any(waits_for_shape(one) for one in parameters.values())
    shapes = [f"{name} {one.shape} {one.dtype}" for name, one in parameters.items()] if has_shapes else []
    return {
        "version": version(),
        "net": f"trains a {type(net).__name__} with {len(parameters)} parameters",
        "names of parameters": f"has parameters of the names {_digest([*parameters])}",
        "numbers of parameters": f"numbers the parameters in the order {_digest(numbered)}",
        "shapes": f"has parameters of the shapes {_digest(shapes)}" if has_shapes else "",
        "optimizer": f"updates by {type(trainer.optimizer).__name__}",
    }


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]


def difference(ours: dict[str, str], of_new: dict[str, str]) -> str:
    """The first thing in which a new process differs from those that run, in words; "" if there is none.

    Example:
        >>> difference({"net": "trains a Dense", "shapes": ""}, {"net": "trains a LeNet", "shapes": "3"})
        'it trains a LeNet; each of the others trains a Dense'
    """
    for name, our_text in ours.items():
        new_text = of_new.get(name, "nothing")
        if our_text and new_text and our_text != new_text:
            return f"it {new_text}; each of the others {our_text}"
    return ""


class Newcomers:
    """What this process has heard of new ones; made where processes may join.

    Args:
        net, trainer: what is trained.
        store: of the processes.
    """

    def __init__(self, net: mx.gluon.Block, trainer: mx.gluon.Trainer, store: Any) -> None:
        self._net, self._trainer, self._store = net, trainer, store
        self._heard: collections.deque[Newcomer] = collections.deque()
        self.leaves = False  # whether this process shall end after its step
        launcher.listen(launcher.STARTS, _start)
        launcher.listen(launcher.LEAVES, self._leave)
        launcher.listen(launcher.JOINS, lambda text: self._heard.append(Newcomer(**json.loads(text))))

    def _leave(self, _: str) -> None:
        self.leaves = True

    def after_step(self) -> Optional[Newcomer]:
        """Between two steps: the new process that all meet now, if there is one.

        The header of the step, which is summed anyway, tells whether all have heard of it.
        """
        heard = len(self._heard) > 0
        if self._store.num_workers > 1:
            header = header_of(self._trainer)
            all_have = header.num_sent > 0 and header.read()["newcomer"][0] == self._store.num_workers
            header.own["newcomer"] = heard and not all_have
            if all_have:
                header.read()["newcomer"] = 0  # it counts for one new process; no step may come before the next look
        else:
            all_have = heard
        return self._heard.popleft() if heard and all_have else None

    def connect(self, new: Newcomer) -> None:
        """Meet a new process; :class:`Differs`: it trains something else; DidNotJoin: it could not be met."""
        found = difference(description(self._net, self._trainer), new.says)
        if found:
            raise Differs(found)
        launcher.send(f"{launcher.MEETS}{new.number}")
        pmix.process_names[new.number] = new.job, 0  # so that MPI hears from the launcher if it is lost meanwhile
        meeting.connect(self._store, new.number, new.port)

    def refuse(self, new: Newcomer, why: Any) -> None:
        """Have the launcher end a new process that has not joined."""
        if self._store.rank == 0:
            launcher.send(f"{launcher.REFUSED}{new.number} {why}")

    def accept(self) -> None:
        """In a new process: tell the launcher that it can be met, and wait for the others."""
        port = meeting.open_port(self._store)
        says, (job, _) = description(self._net, self._trainer), pmix.own_process_name()
        new = Newcomer(self._store.ranks[0], port, os.uname().nodename, job, says)

        def say() -> None:
            time.sleep(_ACCEPTS)  # else the others would look for a port that nobody has made known
            launcher.send(launcher.READY + json.dumps(new._asdict()))

        threading.Thread(target=say, name="gluon_parallel.ready", daemon=True).start()
        meeting.accept(self._store, port)


def leave_after_step() -> None:
    """End this process, as the launcher asks; the others notice it, and go on without it."""
    LOG.info("gluon_parallel: this process leaves: the list of hosts has no place for it")
    end_at_once(0)


def leave(error: BaseException) -> None:
    """End a new process that could not join, without a word to the others, which would end by it."""
    LOG.error(f"gluon_parallel: this process did not join: {type(error).__name__}: {error}")
    end_at_once(1)


def _start(text: str) -> None:
    """Start a new process, as the launcher asks; in a thread, as mpirun may be slow to answer, or stopped."""
    order = json.loads(text)

    def spawn() -> None:
        try:
            pmix.spawn(order["argv"], order["env"], order["cwd"])
        except OSError as error:
            launcher.send(f"{launcher.REFUSED}{order['number']} {error}")

    threading.Thread(target=spawn, name="gluon_parallel.spawn", daemon=True).start()
