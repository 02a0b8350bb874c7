"""Processor time of a process and of those that it has started."""

import os
import signal
import subprocess

from gluon_parallel.kvstore.mpi.processor_time import time_so_far

SCRIPT = """#!/bin/sh
sh -c 'while :; do :; done' &
echo $!
wait
"""


def test_it_counts_processes_below_the_started_ones_whatever_their_names_are(tmp_path):
    script = tmp_path / "a) R (1"  # /proc/N/stat has the name in brackets
    script.write_text(SCRIPT)
    script.chmod(0o755)
    before = time_so_far()
    with subprocess.Popen([script], stdout=subprocess.PIPE, text=True) as started:
        number = int(started.stdout.readline())
        try:
            while not (now := time_so_far()).seconds > before.seconds + 0.3:
                assert now.clock < before.clock + 60, now
        finally:
            os.kill(number, signal.SIGKILL)


def test_it_counts_what_this_process_computes():
    before = time_so_far()
    while not (now := time_so_far()).is_busy_since(before) or now.seconds < before.seconds + 0.1:
        assert now.clock < before.clock + 60, now
