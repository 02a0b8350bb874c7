"""Runs random trainings in processes of their own, which are replaced now and then: MXNet keeps memory."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from processes import MPIRUN, PYTHONPATH
from trainings_case import Case

WORKER = Path(__file__).with_name("trainings_worker.py")
SECONDS = 120  # for one case; the largest takes some two on an idle core
LIMIT = 30  # seconds for which one process waits for another
CASES = 300  # of one process: each leaves the memory of its threads behind


class Ended(Exception):
    """A process ended, or did not answer in time; the text says what it printed last."""


class Pool:
    """A process for the cases of one, and a group for those of two; ``with Pool() as pool: pool.run(case)``."""

    def __init__(self, num_cases=CASES):
        self._num_cases, self._groups = num_cases, {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for group in self._groups.values():
            group.end()

    def run(self, case: Case, alone=False):
        """(kind, text) of the outcome; `alone`: in a fresh process."""
        group = self._groups.pop(case.processes, None)
        if group is not None and (alone or group.num_cases >= self._num_cases):
            group.end()
            group = None
        try:
            group = group or Group(case.processes)
            outcomes = group.run(case)
        except Ended as error:
            if group is not None:
                group.end()
            return "failed", str(error)
        self._groups[case.processes] = group
        ends = {kind for kind, _ in outcomes}
        if case.processes > 1 and not (len(ends) == 1 and ends <= {"equal", "different"}):  # they may be out of step
            self._groups.pop(case.processes).end()
        return together(outcomes)


def together(outcomes):
    """One outcome of those of the processes: the worst, with the number of its process.

    Where one has waited for another in vain, the other one's says why.
    """
    order = ["failed", "different", "refused", "impossible", "waited", "equal"]
    rank = min(range(len(outcomes)), key=lambda rank: order.index(outcomes[rank][0]))
    kind, text = outcomes[rank]
    kind = "failed" if kind == "waited" else kind
    return kind, f"process {rank}: {text}" if len(outcomes) > 1 and text else text


class Group:
    """Processes that are under way, each at a socket."""

    def __init__(self, num):
        self.num_cases, self._folder = 0, tempfile.mkdtemp()
        self._output = open(Path(self._folder, "output"), "w+", encoding="utf-8", errors="replace")
        self._streams = []
        path = str(Path(self._folder, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(num)
            listener.settimeout(SECONDS)
            self._process = self._start(num, path)
            try:
                self._connections = [listener.accept()[0] for _ in range(num)]
            except TimeoutError:
                said = self._said()
                self.end()
                raise Ended(f"the processes have not come within {SECONDS} s: {said}") from None
        for connection in self._connections:
            connection.settimeout(SECONDS)
        streams = [connection.makefile("rw", encoding="utf-8") for connection in self._connections]
        self._streams = [stream for _, stream in sorted((int(one.readline()), one) for one in streams)]

    def _start(self, num, path):
        allowed = {f"{name}_ALLOW_RUN_AS_ROOT{more}": "1" for name in ("OMPI", "PRTE") for more in ("", "_CONFIRM")}
        environment = {
            **os.environ, **(allowed if num > 1 else {}), "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1",
            "GLUON_PARALLEL_TIMEOUT": str(LIMIT), "GLUON_PARALLEL_FLIGHT_RECORDER": self._folder,
            "OMPI_MCA_btl": "^tcp", "PRTE_MCA_prte_tmpdir_base": self._folder,
        }  # fmt: skip
        command = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", str(num)] if num > 1 else []
        return subprocess.Popen(
            [*command, sys.executable, str(WORKER), path], env=environment, stdin=subprocess.DEVNULL,
            stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(self, case):
        """The outcome of each process; Ended: one has none."""
        self.num_cases += 1
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            for stream in self._streams:
                print(json.dumps([str(case), folder]), file=stream, flush=True)
            try:
                return [json.loads(stream.readline()) for stream in self._streams]
            except TimeoutError:
                why = f"no answer after {SECONDS} s"
            except (ValueError, OSError):
                self._process.poll()
                why = "the process ended"
        raise Ended(f"{why}, as case {self.num_cases} of its process: {self._said()}")

    def _said(self):
        self._output.flush()
        return Path(self._folder, "output").read_text(encoding="utf-8", errors="replace")[-2000:]

    def end(self):
        """Leave nothing behind."""
        for one in (*self._streams, *getattr(self, "_connections", ())):
            try:
                one.close()
            except OSError:
                continue
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._output.close()
        shutil.rmtree(self._folder, ignore_errors=True)
