"""Draw random trainings, and compare each with a plain loop on one device; where it differs, make it smaller.

    python scripts/studies/random_trainings.py --minutes 120 --seed 7      those of seeds 7, 8, 9, ...
    python scripts/studies/random_trainings.py --seed 7 --num 1            that of seed 7
    python scripts/studies/random_trainings.py --case "{'way': 'loop'}"    this one, as printed

A line per training has its seed, what came of it, and what is not the default in it. It is equal to one device;
refused by an error or warning of gluon_parallel; different; failed, by another error; or impossible, since MXNet fails
on one device. Each runs in a process, or in a group of two, that is replaced now and then.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import trainings_draw
from trainings_case import Case
from trainings_pool import Pool

SHRINK = 90  # seconds for making one smaller
WRONG = "different", "failed"


class Wrong(Exception):
    """A training that differs or failed; Hypothesis takes those of one class for one fault."""


class Study:
    """Runs trainings, counts what came of them, and says what is wrong."""

    def __init__(self, pool: Pool, is_quiet: bool) -> None:
        self._pool, self._is_quiet = pool, is_quiet
        self._faults: dict[str, type[Wrong]] = {}
        self.counts: collections.Counter[str] = collections.Counter()
        self.refusals: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    def examine(self, seed: int) -> None:
        """The training of a seed; one that is wrong is made smaller for a while."""
        known: dict[str, tuple[str, str]] = {}
        shrinks_until, smallest = 0.0, Case()

        def check(case: Case) -> None:
            nonlocal shrinks_until, smallest
            text = str(case)
            if text not in known:
                is_first, is_late = not known, known and time.monotonic() > shrinks_until
                known[text] = ("equal", "") if is_late else self._pool.run(case)
                if is_first:
                    self._count(seed, case, *known[text])
                    shrinks_until = time.monotonic() + SHRINK
            if known[text][0] in WRONG:
                smallest = case
                raise self._fault(case.way, *known[text])

        try:
            trainings_draw.examine(seed, check)
        except Wrong:
            self.report(f"seed {seed}", smallest, known[str(smallest)][1])

    def _fault(self, way: str, kind: str, text: str) -> Wrong:
        """An exception whose class is that of the fault: differences in one way, or the last line of an error."""
        name = f"{kind} {way}" if kind == "different" else text.strip().rpartition("\n")[2][:60]
        return self._faults.setdefault(name, type(name, (Wrong,), {}))()

    def _count(self, seed: int, case: Case, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if kind == "refused":
            self.refusals[text.partition(":")[0]] += 1
        if not self._is_quiet or kind in WRONG:
            print(f"{seed:<7} {kind:10} {case}", flush=True)
            if kind in ("refused", "impossible"):
                print(f"{'':18} {text.splitlines()[0][:200]}", flush=True)

    def report(self, name: str, case: Case, before: str = "") -> None:
        """Say what comes of a training in a fresh process, and how it is repeated; `before`: what came of it before."""
        kind, text = self._pool.run(case, alone=True)
        what = kind if kind in WRONG else f"{kind} in a fresh process, wrong after other trainings"
        text = text if kind in WRONG else before or text
        self.wrong.append(f'{name}: {what}\n  python {sys.argv[0]} --case "{case}"')
        print(f"\n{self.wrong[-1]}\n  " + "\n  ".join(text.splitlines()) + "\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2, help="after which no other training begins")
    parser.add_argument("--seed", type=int, help="of the first training; by default a random one")
    parser.add_argument("--num", type=int, default=10**9, help="how many trainings, at most")
    parser.add_argument("--case", help="one training, as printed")
    parser.add_argument("--quiet", action="store_true", help="print only what is wrong")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of Hypothesis, about how it is used
    with Pool() as pool:
        study = Study(pool, options.quiet)
        if options.case:
            study.report("case", Case.read(options.case))
            return
        first, ends = options.seed, time.monotonic() + 60 * options.minutes
        first = random.randrange(10**6) if first is None else first
        for seed in range(first, first + options.num):
            if time.monotonic() > ends:
                break
            study.examine(seed)
    counts = ", ".join(f"{num} {kind}" for kind, num in sorted(study.counts.items()))
    refusals = "".join(f"\n  refused by {name}: {num}" for name, num in sorted(study.refusals.items()))
    print(f"{sum(study.counts.values())} trainings from seed {first} on: {counts}{refusals}")
    print("\n".join(study.wrong))
    sys.exit(bool(study.wrong))


if __name__ == "__main__":
    main()
