"""How the secret of a running flow is replaced, decided without a connection.

    STEADY --asked--> OFFERED --> SWITCHED --> RETIRED --> STEADY, each when all have confirmed

| phase | every process accepts | and dials with |
| --- | --- | --- |
| OFFERED | the old keys and the new | the old |
| SWITCHED | both | the new |
| RETIRED | the new; connections that were opened with the old ones are closed | the new |

Two processes whose phases are next to each other always have keys in common, and a phase begins
only when everybody is in the one before, so no connection is refused on the way. A leader that is
lost leaves the processes in some phase; all of them hold the new keys or none dials with them, and
asking again completes it. What is sent says which keys to hold, not what to change, so it may come
twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from holdfast.errors import ProtocolError

Member = tuple[str, int]
"""The role and number of a site or of another application's control."""


class RotationPhase(Enum):
    STEADY = "steady"
    OFFERED = "offered"
    SWITCHED = "switched"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class Asked:
    """Replace the keys `old` by the keys `new`."""

    old: str
    new: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A member holds these keys, and dials with the first."""

    member: Member
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    member: Member


@dataclass(frozen=True, slots=True)
class Left:
    member: Member


@dataclass(frozen=True, slots=True)
class TermEnded:
    """This application leads no more. Everybody keeps what it holds."""


@dataclass(frozen=True, slots=True)
class AllConfirmed:
    """Derived from the others: nobody is waited for any more."""


RotationEvent = Asked | Confirmed | Joined | Left | TermEnded

EDGES: dict[tuple[RotationPhase, type], RotationPhase] = {
    (RotationPhase.STEADY, Asked): RotationPhase.OFFERED,
    (RotationPhase.OFFERED, AllConfirmed): RotationPhase.SWITCHED,
    (RotationPhase.SWITCHED, AllConfirmed): RotationPhase.RETIRED,
    (RotationPhase.RETIRED, AllConfirmed): RotationPhase.STEADY,
    (RotationPhase.OFFERED, TermEnded): RotationPhase.STEADY,
    (RotationPhase.SWITCHED, TermEnded): RotationPhase.STEADY,
    (RotationPhase.RETIRED, TermEnded): RotationPhase.STEADY,
}


class Rotation:
    """`handle` returns the phases that the rotation has entered, in order: for each of them the
    owner has every member hold `held(phase)`."""

    def __init__(self) -> None:
        self.phase = RotationPhase.STEADY
        self._old = self._new = ""
        self._members: dict[Member, None] = {}
        self._waits_for: dict[Member, None] = {}

    def held(self, phase: RotationPhase) -> tuple[str, ...]:
        """The ids of the keys to hold in a phase; to dial with the first."""
        return {
            RotationPhase.STEADY: (self._new,),
            RotationPhase.OFFERED: (self._old, self._new),
            RotationPhase.SWITCHED: (self._new, self._old),
            RotationPhase.RETIRED: (self._new,),
        }[phase]

    @property
    def waits_for(self) -> list[Member]:
        return list(self._waits_for)

    def handle(self, event: RotationEvent) -> list[RotationPhase]:
        match event:
            case Asked():
                return self._on_asked(event)
            case TermEnded():
                self._move(event)
                self._waits_for = {}
                return []
            case Confirmed():
                if event.ids == self.held(self.phase):
                    self._waits_for.pop(event.member, None)
            case Joined() if self._under_way:
                self._members[event.member] = self._waits_for[event.member] = None
            case Left():
                self._members.pop(event.member, None)
                self._waits_for.pop(event.member, None)
        return self._go_on()

    def _on_asked(self, event: Asked) -> list[RotationPhase]:
        self._move(event)
        self._old, self._new = event.old, event.new
        self._members = dict.fromkeys(event.members)
        self._waits_for = dict(self._members)
        return [self.phase, *self._go_on()]

    def _go_on(self) -> list[RotationPhase]:
        """Enter the next phase once nobody is waited for."""
        entered: list[RotationPhase] = []
        while self._under_way and not self._waits_for:
            self._move(AllConfirmed())
            entered.append(self.phase)
            if self._under_way:
                self._waits_for = dict(self._members)
        return entered

    @property
    def _under_way(self) -> bool:
        return self.phase is not RotationPhase.STEADY

    def _move(self, event: Asked | AllConfirmed | TermEnded) -> None:
        following = EDGES.get((self.phase, type(event)))
        if following is None:
            raise ProtocolError(f"{type(event).__name__} while a rotation is {self.phase.value}")
        self.phase = following


def members_of(sites: Iterable[int], apps: Iterable[int]) -> tuple[Member, ...]:
    return (*(("site", site) for site in sites), *(("agent", app) for app in apps))
