"""Which seed catches each planted bug, so that one run each is enough to show that it is caught.

A change of the protocol, of what is drawn from a seed, or of a bug moves them. Then look for them
again and commit what has changed:

    python -m tests.support.find_seeds            # all that are not caught any more, and new bugs
    python -m tests.support.find_seeds --all      # from scratch
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from holdfast.lab.sim.bugs import BUGS
from holdfast.lab.sim.explore import run
from holdfast.lab.sim.planted import Bug

FILE = Path(__file__).with_name("caught.json")
AGAIN = "look for seeds again: python -m tests.support.find_seeds"


def stored() -> dict[str, int]:
    """The seed of each bug, by its name."""
    return dict(json.loads(FILE.read_text())) if FILE.exists() else {}


def catches(bug: Bug, seed: int) -> bool:
    """Whether the checks say that something is wrong in this run."""
    with bug.planted():
        return run(bug.case(seed)).problem is not None


def first_seed(bug: Bug) -> int | None:
    """The first of its seeds that catches it."""
    with bug.planted():
        return next((s for s in range(bug.seeds) if run(bug.case(s)).problem is not None), None)


def _found(number: int, known: int | None) -> int | None:
    bug = BUGS[number]
    return known if known is not None and catches(bug, known) else first_seed(bug)


def main(arguments: list[str]) -> int:
    before = {} if arguments == ["--all"] else stored()
    known = [before.get(bug.name) for bug in BUGS]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        found = list(pool.map(_found, range(len(BUGS)), known))
    seeds = {bug.name: seed for bug, seed in zip(BUGS, found, strict=True) if seed is not None}
    FILE.write_text(json.dumps(dict(sorted(seeds.items())), indent=2) + "\n")
    for bug, seed in zip(BUGS, found, strict=True):
        if seed is None:
            print(f"{bug.name!r} is not caught by any of its {bug.seeds} seeds", file=sys.stderr)
        elif seed != before.get(bug.name):
            print(f"{bug.name!r} is caught by seed {seed}")
    return int(None in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
