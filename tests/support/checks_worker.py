"""One process of a group that runs checks under pytest: ``python checks_worker.py STORE FOLDER FILE::CHECK...``.

Every process runs the same checks in the same order with one store, and writes pytest's report of each into FOLDER.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import simulated_hosts

import gluon_parallel as gp


class Worker:
    """pytest's plugin in one process: the fixtures of checks, and a line of JSON for each check that has ended."""

    def __init__(self, store_name, folder):
        self._name, self._store = store_name, gp.kvstore.create(store_name)
        self._path = Path(folder, f"{self._store.rank}.jsonl")

    @pytest.fixture(scope="session")
    def store(self):
        return self._store

    @pytest.fixture(scope="session")
    def store_name(self):
        return self._name

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.failed:
            check = report.nodeid.rpartition("::")[2]
            line = {"check": check, "rank": self._store.rank, "passed": report.passed, "text": report.longreprtext}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def main(store_name, folder, *checks):
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    simulated_hosts.simulate()
    here = Path(__file__).parent
    options = ["-c", os.devnull, "--rootdir", str(here), "--noconftest", "-p", "no:cacheprovider"]
    options += ["-o", "python_files=*.py", "-o", "python_functions=check_*", "-q", "--exitfirst", "--capture=no"]
    status = pytest.main([*options, *(str(here / check) for check in checks)], plugins=[Worker(store_name, folder)])
    sys.exit(int(status))


if __name__ == "__main__":
    main(*sys.argv[1:])
