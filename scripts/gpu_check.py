"""Try everything that needs GPUs on this machine's, and write one report to send back.

    make venv MXNET=mxnet-cu112                  or mxnet-cu117: installs MXNet's build for GPUs
    .venv/bin/python scripts/gpu_check.py        tries everything
    python scripts/gpu_check.py --dry-run        says what would be tried, or why nothing can be; needs only Python

The report is what the commands print: the doctor, training on all GPUs against one, tests on GPUs, and benchmarks of
scaling. The exit status is 0 if none of them failed, 1 if one did, 2 without a usable GPU.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["sync_batch_norm", "sync_batch_norm_training", "data_parallel"]
SUMS = ["allreduce"]  # over several GPUs


def steps(num: int) -> dict[str, list[str]]:
    """What is run on that many GPUs: name -> command."""
    ours, devices = [sys.executable, "-m", "gluon_parallel"], ["--devices", f"gpu:{num}"]
    tests = [f"tests/test_{name}.py" for name in [*TESTS, *SUMS * (num > 1)]]
    return {
        "driver": ["nvidia-smi"],
        "links": ["nvidia-smi", "topo", "-m"],
        "doctor": [*ours, "doctor", "--timeout", "220"],
        "parity with SyncBatchNorm": [*ours, "parity", *devices],
        "parity without": [*ours, "parity", *devices, "--net", "plain"],
        "tests": [sys.executable, "-m", "pytest", "-p", "no:xdist", "-q", "--devices", "gpu", *tests],
        "scaling": [sys.executable, "scripts/benchmarks/data_parallel.py", *devices],
        "cost of SyncBatchNorm": [sys.executable, "scripts/benchmarks/sync_batch_norm.py", *devices],
    }


def look() -> tuple[list[str], list[str]]:
    """(the GPUs, what keeps MXNet's wheels from them) in words, before MXNet is imported or even installed."""
    sys.path.insert(0, str(ROOT / "gluon_parallel" / "mxnet"))  # `import gluon_parallel` would need MXNet
    from cuda import driver, problems

    answers = driver.ask_apart() or {"error": "it was not asked"}
    cards = [f"gpu({number}), {name}, compute capability {problems.dotted(capability)}"
             for number, (name, capability) in enumerate(answers.get("devices", []))]  # fmt: skip
    return cards, [f"{text} ({cure})" for text, cure in problems.of_driver(answers)]


def run(name: str, command: list[str], seconds: float, write) -> str:
    """Run one command and write what it prints, as it comes; returns how it ended."""
    write(f"\n==== {name}: {' '.join(command)}\n")
    start = time.monotonic()
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return f"not run: {error.strerror}"
    late = threading.Timer(seconds, process.terminate)  # a benchmark ends its processes then
    lost = threading.Timer(seconds + 20, os.killpg, (process.pid, signal.SIGKILL))
    with process:
        late.start()
        lost.start()
        try:
            for line in process.stdout or ():
                write(line)
            status = process.wait()
        except BaseException:  # Ctrl+C, or a full disk
            process.terminate()
            raise
        finally:
            late.cancel()
            lost.cancel()
    ended = "ok" if status == 0 else f"FAILED with status {status}"
    return f"{ended}, {time.monotonic() - start:.0f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", default="gpu-report.txt", metavar="FILE", help="what is written (gpu-report.txt)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run; without a usable GPU status 2")
    parser.add_argument("--seconds", type=float, default=1800, help="limit of each command (1800)")
    options = parser.parse_args()
    cards, wrong = look()
    if wrong:
        print(f"gpu-check: this machine has no GPU that MXNet's wheels can use. {' '.join(wrong)}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(cards))
    plan = steps(len(cards))
    if options.dry_run:
        for name, command in plan.items():
            print(f"{name}: {' '.join(command)}")
        return
    results = {}
    with open(options.report, "w", encoding="utf-8") as file:

        def write(text: str) -> None:
            sys.stdout.write(text)
            file.write(text)
            file.flush()

        write(f"gpu-check, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC\n" + "\n".join(cards))
        for name, command in plan.items():
            results[name] = run(name, command, options.seconds, write)
            write(f"---- {results[name]}\n")
        write("\n==== summary\n" + "".join(f"{name}: {ended}\n" for name, ended in results.items()))
    print(f"\nThe report is {options.report}.")
    sys.exit(any(ended.startswith("FAILED") for ended in results.values()))


if __name__ == "__main__":
    main()
