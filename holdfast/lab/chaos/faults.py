"""What happens to the flow, in which order: drawn from a seed, and from nothing else.

A fault names its victims by their rank among the sites that live when it happens, since processes
and numbers of sites are others in every run. Whether it may happen is asked of the flow's view: of
every partition a replica must remain that lives and is up to date, or is a standby, or else it must
be one that is rebuilt from its input.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Deaths(Enum):
    """What becomes of a fault's victims."""

    ALL = "must die"
    ONE = "one of them must be let go"
    NONE = "must stay"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault, and how often it occurs among the others.

    *kill* is SIGKILL, *stop* SIGSTOP and later SIGCONT. A *reset* breaks connections, *apart* lets
    nothing through between two sites that both reach the controller, and *cut off* nothing
    between a site and everybody else. The flow recovers from two that are apart while they are.
    """

    name: str
    weight: int
    victims: int
    deaths: Deaths
    lasts: tuple[float, float] = (0.0, 0.0)
    """For how long, in leases: at least and at most."""
    needs: str = ""
    """What a host must offer for it."""


KILL = Kind("kill", 5, 1, Deaths.ALL)
TWO_KILLS = Kind("kill two at once", 2, 2, Deaths.ALL)
NAP = Kind("stop < lease", 3, 1, Deaths.NONE, (0.1, 0.4))
SLEEP = Kind("stop > lease", 3, 1, Deaths.ALL, (1.3, 2.0))
RESET = Kind("reset between two", 4, 2, Deaths.NONE, needs="proxy")
RESET_CONTROL = Kind("reset to controller", 2, 1, Deaths.NONE, needs="proxy")
HOLD = Kind("two apart < lease", 1, 2, Deaths.NONE, (0.1, 0.5), "proxy")
PART = Kind("two apart > lease", 2, 2, Deaths.ONE, (3.0, 10.0), "proxy")
BLIP = Kind("cut off < lease", 2, 1, Deaths.NONE, (0.1, 0.3), "namespaces")
CUT = Kind("cut off > lease", 2, 1, Deaths.ALL, (1.3, 2.0), "namespaces")
EXECUTOR = Kind("kill an executor", 3, 1, Deaths.ALL, needs="executors")
DISK = Kind("slow or full disk", 1, 1, Deaths.NONE, needs="spilling")

KINDS = (KILL, TWO_KILLS, NAP, SLEEP, RESET, RESET_CONTROL, HOLD, PART, BLIP, CUT, EXECUTOR, DISK)

DRIVER = Kind("kill a driver", 1, 0, Deaths.ALL)
ARBITER_KILL = Kind("kill the arbiter", 1, 0, Deaths.NONE, (0.5, 4.0), "zookeeper")
ARBITER_STOP = Kind("stop the arbiter", 1, 0, Deaths.NONE, (0.5, 4.0), "zookeeper")
ARBITER_SITE = Kind("kill a site, the arbiter away", 1, 1, Deaths.ALL, (1.0, 4.0), "zookeeper")

APPS_KINDS = (DRIVER, ARBITER_KILL, ARBITER_SITE, ARBITER_STOP)
"""What can happen to a flow in two applications: see `holdfast.lab.chaos.apps`."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is to happen."""

    number: int
    kind: Kind
    rank: int
    """Which of the living, or of their pairs, counted round and round."""
    pause_s: float
    """How long nothing happens before it."""
    lasts: float
    """In leases."""
    finished_before: bool
    """It does not wait until the last one is mended."""

    def __str__(self) -> str:
        how = " in a hurry" if self.finished_before else ""
        return f"{self.number}: {self.kind.name}{how}, rank {self.rank}"


PAUSE_S_MAX = 0.4
HURRIED = 0.6
"""The share of faults that do not wait until everything is protected."""


def faults(seed: int, kinds: Sequence[Kind]) -> Iterator[Fault]:
    """Faults without end. Kinds are dealt like cards, so that each has its share of any hundred.

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


def in_turn(seed: int, kinds: Sequence[Kind], first: int = 0) -> Iterator[Fault]:
    """Faults without end, of one kind after the other, each when the last is mended: for those that
    take long, and are few."""
    random_ = random.Random(seed)
    for number, kind in enumerate(itertools.cycle(kinds), first):
        yield replace(_drawn(random_, number, kind), finished_before=False)


def _drawn(random_: random.Random, number: int, kind: Kind) -> Fault:
    return Fault(
        number,
        kind,
        random_.randrange(1 << 16),
        random_.uniform(0.0, PAUSE_S_MAX),
        random_.uniform(*kind.lasts),
        random_.random() < HURRIED,
    )


def candidates(fault: Fault, living: Collection[int]) -> list[tuple[int, ...]]:
    """Who it could happen to, the first choice first.

    >>> candidates(Fault(0, TWO_KILLS, 4, 0.0, 0.0, False), [3, 5, 9])
    [(3, 9), (5, 9), (3, 5)]
    """
    groups = list(itertools.combinations(sorted(living), fault.kind.victims))
    first = fault.rank % len(groups) if groups else 0
    return groups[first:] + groups[:first]


def survivable(
    partitions: Sequence[Mapping[str, Any]], gone: Collection[int], rebuilt: Collection[str] = ()
) -> bool:
    """Whether a replica of everything is left without these sites, and can go on at once; but for
    the stages that are `rebuilt`: what they need is kept by those before them, of which in the
    end that is the source, and a replica of it is left.

    `partitions` is what ``run.status()`` says of them. A replica that is being made does not count,
    and neither does the last one of several that still replays.
    """
    return all(set(able(p)) - set(gone) for p in partitions if p["stage"] not in rebuilt)


def able(partition: Mapping[str, Any]) -> list[int]:
    """The sites that can go on with it: replicas that are up to date, and standbys."""
    replicas = list(partition["replicas"])
    if partition["phase"] == "replaying" and len(replicas) > 1:
        replicas = replicas[:-1]
    return replicas + list(partition["standbys"])
