"""Draws the sequence of faults from a seed, and from nothing else.

A fault names its victims by their rank among the sites that are alive when it happens, because
process ids and site ids differ from run to run. The flow's view decides whether a fault is
permitted: every partition must keep a live replica that is up to date, or a standby, unless it is
one that is rebuilt from its input.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Deaths(Enum):
    """Which victims of a fault must be declared dead."""

    ALL = "all"
    ONE = "one of them"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class FaultKind:
    """A kind of fault, and its weight among the others.

    *kill* is SIGKILL; *stop* is SIGSTOP and later SIGCONT; *reset* breaks connections; *apart*
    drops everything between two sites that both reach the controller; *cut off* drops everything
    between a site and all others. The flow recovers from *apart* while the two are still separated.
    """

    name: str
    weight: int
    victims: int
    deaths: Deaths
    lasts: tuple[float, float] = (0.0, 0.0)
    """Minimum and maximum duration, in leases."""
    needs: str = ""
    """The facility that the host must offer."""


KILL = FaultKind("kill", 5, 1, Deaths.ALL)
TWO_KILLS = FaultKind("kill two at once", 2, 2, Deaths.ALL)
NAP = FaultKind("stop < lease", 3, 1, Deaths.NONE, (0.1, 0.4))
SLEEP = FaultKind("stop > lease", 3, 1, Deaths.ALL, (1.3, 2.0))
RESET = FaultKind("reset between two", 4, 2, Deaths.NONE, needs="proxy")
RESET_CONTROL = FaultKind("reset to controller", 2, 1, Deaths.NONE, needs="proxy")
HOLD = FaultKind("two apart < lease", 1, 2, Deaths.NONE, (0.1, 0.5), "proxy")
PART = FaultKind("two apart > lease", 2, 2, Deaths.ONE, (3.0, 10.0), "proxy")
BLIP = FaultKind("cut off < lease", 2, 1, Deaths.NONE, (0.1, 0.3), "namespaces")
CUT = FaultKind("cut off > lease", 2, 1, Deaths.ALL, (1.3, 2.0), "namespaces")
EXECUTOR = FaultKind("kill an executor", 3, 1, Deaths.ALL, needs="executors")
DISK = FaultKind("slow or full disk", 1, 1, Deaths.NONE, needs="spilling")

KINDS = (KILL, TWO_KILLS, NAP, SLEEP, RESET, RESET_CONTROL, HOLD, PART, BLIP, CUT, EXECUTOR, DISK)

DRIVER = FaultKind("kill a driver", 1, 0, Deaths.ALL)
ARBITER_KILL = FaultKind("kill the arbiter", 1, 0, Deaths.NONE, (0.5, 4.0), "zookeeper")
ARBITER_STOP = FaultKind("stop the arbiter", 1, 0, Deaths.NONE, (0.5, 4.0), "zookeeper")
ARBITER_SITE = FaultKind(
    "kill a site without an arbiter", 1, 1, Deaths.ALL, (1.0, 4.0), "zookeeper"
)

APPS_KINDS = (DRIVER, ARBITER_KILL, ARBITER_SITE, ARBITER_STOP)
"""The faults of a flow in two applications: see `holdfast.lab.chaos.apps`."""


@dataclass(frozen=True, slots=True)
class ChaosFault:
    """One fault to inject."""

    number: int
    kind: FaultKind
    rank: int
    """The index of the victims among the live sites, or among their pairs, modulo their number."""
    pause_s: float
    """Time without faults before it."""
    lasts: float
    """Duration in leases."""
    overlaps: bool
    """It does not wait until the flow has recovered from the last fault."""

    def __str__(self) -> str:
        how = " (overlapping)" if self.overlaps else ""
        return f"{self.number}: {self.kind.name}{how}, rank {self.rank}"


PAUSE_S_MAX = 0.4
OVERLAPPING = 0.6
"""Share of faults that do not wait until everything is protected."""


def faults(seed: int, kinds: Sequence[FaultKind]) -> Iterator[ChaosFault]:
    """Yield faults without end. Kinds are dealt like cards, so each has its share of any hundred.

    >>> [f.kind.name for f in itertools.islice(faults(7, [KILL, NAP]), 3)]
    ['stop < lease', 'stop < lease', 'kill']
    """
    random_ = random.Random(seed)
    numbers = itertools.count()
    while True:
        deck = [kind for kind in kinds for _ in range(kind.weight)]
        random_.shuffle(deck)
        for kind in deck:
            yield _drawn(random_, next(numbers), kind)


def in_turn(seed: int, kinds: Sequence[FaultKind], first: int = 0) -> Iterator[ChaosFault]:
    """Yield faults without end, one kind after the other, each after recovery from the last: for
    faults that take long and are few."""
    random_ = random.Random(seed)
    for number, kind in enumerate(itertools.cycle(kinds), first):
        yield replace(_drawn(random_, number, kind), overlaps=False)


def _drawn(random_: random.Random, number: int, kind: FaultKind) -> ChaosFault:
    return ChaosFault(
        number,
        kind,
        random_.randrange(1 << 16),
        random_.uniform(0.0, PAUSE_S_MAX),
        random_.uniform(*kind.lasts),
        random_.random() < OVERLAPPING,
    )


def candidates(fault: ChaosFault, living: Collection[int]) -> list[tuple[int, ...]]:
    """Return the possible groups of victims, in the order of preference.

    >>> candidates(ChaosFault(0, TWO_KILLS, 4, 0.0, 0.0, False), [3, 5, 9])
    [(3, 9), (5, 9), (3, 5)]
    """
    groups = list(itertools.combinations(sorted(living), fault.kind.victims))
    first = fault.rank % len(groups) if groups else 0
    return groups[first:] + groups[:first]


def survivable(
    partitions: Sequence[Mapping[str, Any]], lost: Collection[int], rebuilt: Collection[str] = ()
) -> bool:
    """Return whether every task keeps a replica that can continue immediately without these sites.

    Stages that are `rebuilt` need none: the stages before them retain their input, ultimately the
    source, which keeps a replica. `partitions` comes from ``run.status()``. A joining replica does
    not count, and neither does the last of several replicas that is still replaying.
    """
    return all(set(able(p)) - set(lost) for p in partitions if p["stage"] not in rebuilt)


def able(partition: Mapping[str, Any]) -> list[int]:
    """Return the sites that can continue a task: replicas that are up to date, and standbys."""
    replicas = list(partition["replicas"])
    if partition["phase"] == "replaying" and len(replicas) > 1:
        replicas = replicas[:-1]
    return replicas + list(partition["standbys"])
