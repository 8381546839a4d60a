"""Leadership of a flow, as one application sees it.

A flow may be hosted by several applications, each with a `Leadership`. The arbiter decides which
one leads: it grants a term, and accepts the commits of the leader of that term only. The machine
guarantees:

- A leader acts on nothing that the arbiter has not committed (`CommitDone` comes first).
- It leads only while its lease runs by its own clock. The lease counts from before it asked, so it
  has stepped down before the arbiter lets another application lead.
- No term is led twice. Sites tell leaders apart by their terms, and each term numbers its own
  sites.

The machine does not know what is committed: a value is opaque, and so is the use of a term. The
caller executes the asks and answers each exactly once, however late, naming the ask. An answer to
an ask that no longer counts changes nothing. At most one ask is under way, and at most one commit
in addition.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import assert_never

from holdfast.core.effects import (
    AskCommit,
    AskLead,
    AskRead,
    AskRenew,
    AskResign,
    BeginTerm,
    CommitDone,
    EndTerm,
    FollowEntry,
    LeadershipEffect,
    LeadershipOver,
)
from holdfast.core.events import (
    ArbiterUnreachable,
    CommitRefused,
    Committed,
    CommitWanted,
    EndCommitted,
    EndWanted,
    EntryRead,
    FlowEnded,
    LeadDue,
    LeaderFound,
    LeaderGone,
    LeaderMissed,
    LeadershipEvent,
    LeadGranted,
    LeadRefused,
    LeaseLost,
    Renewed,
    Resigned,
    TermTaken,
)
from holdfast.core.ids import Entry
from holdfast.errors import InvariantError


class Role(Enum):
    FOLLOWING = "following"
    TAKING_OVER = "taking over"
    LEADING = "leading"
    COMMITTING = "committing"
    ENDING = "ending"
    OVER = "over"


TABLE: dict[tuple[Role, type], Role] = {
    (Role.FOLLOWING, LeadGranted): Role.TAKING_OVER,
    (Role.FOLLOWING, FlowEnded): Role.OVER,
    (Role.TAKING_OVER, TermTaken): Role.LEADING,
    (Role.TAKING_OVER, LeaseLost): Role.FOLLOWING,
    (Role.TAKING_OVER, FlowEnded): Role.OVER,
    (Role.LEADING, CommitWanted): Role.COMMITTING,
    (Role.LEADING, EndWanted): Role.ENDING,
    (Role.LEADING, LeaseLost): Role.FOLLOWING,
    (Role.COMMITTING, Committed): Role.LEADING,
    (Role.COMMITTING, EndWanted): Role.ENDING,
    (Role.COMMITTING, CommitRefused): Role.FOLLOWING,
    (Role.COMMITTING, LeaseLost): Role.FOLLOWING,
    (Role.ENDING, EndCommitted): Role.OVER,
    (Role.ENDING, CommitRefused): Role.FOLLOWING,
    (Role.ENDING, LeaseLost): Role.FOLLOWING,
}
"""Events that are not here leave the role as it is, or are impossible in it."""


class Leadership:
    """The machine. `holder` is the name of this application in the arbiter's entry."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.role = Role.FOLLOWING
        self.history: deque[str] = deque(maxlen=50)
        self.entry: Entry | None = None
        """The last entry that is known to be committed in the term that this application leads."""
        self.term = 0
        """The last term that was granted to this application."""
        self.known_term = 0
        """The last term that it knows of, also of other leaders."""
        self.lease_until = 0.0
        self.leader: str | None = None
        """The leader that it is connected to and follows."""
        self._asks = 0
        self._asking: AskLead | AskRenew | AskRead | AskResign | None = None
        self._asked_at = 0.0
        self._committing: AskCommit | None = None
        self._unheard = False
        """Whether the commit under way must be asked again because its answer was lost."""
        self._next: CommitWanted | EndWanted | None = None
        """The commit that follows it; always the latest wanted."""

    @property
    def leads(self) -> bool:
        """Whether this application leads a term or is taking one over."""
        return self.role in (Role.TAKING_OVER, Role.LEADING, Role.COMMITTING, Role.ENDING)

    @property
    def lasts(self) -> bool:
        """Whether the term needs no renewal, because no other application can lead."""
        return self.leads and self.lease_until == float("inf")

    def handle(self, event: LeadershipEvent, now: float) -> list[LeadershipEffect]:
        effects: list[LeadershipEffect] = []
        if self.leads and now >= self.lease_until:
            effects = self._lose(LeaseLost(None, "its lease has expired by its own clock"))
        return effects + self._handle(event, now)

    def _handle(self, event: LeadershipEvent, now: float) -> list[LeadershipEffect]:
        match event:
            case LeadDue():
                return self._on_lead_due(now)
            case LeadGranted():
                return self._on_lead_granted(event, now)
            case LeadRefused():
                return self._on_lead_refused(event, now)
            case Renewed():
                return self._on_renewed(event)
            case LeaseLost():
                return self._on_lease_lost(event)
            case Resigned():
                return self._on_resigned(event, now)
            case EntryRead():
                return self._on_entry_read(event)
            case TermTaken():
                return self._on_term_taken(event)
            case CommitWanted() | EndWanted():
                return self._on_wanted(event)
            case Committed():
                return self._on_committed(event)
            case CommitRefused():
                return self._on_commit_refused(event)
            case ArbiterUnreachable():
                return self._on_unreachable(event)
            case LeaderFound():
                self.leader = event.holder
                return []
            case LeaderMissed():
                return self._on_leader_missed(event, now)
            case LeaderGone():
                return self._on_leader_gone(event, now)
            case FlowEnded():
                return self._on_flow_ended()
        assert_never(event)

    def _become(self, cause: type) -> None:
        role = TABLE.get((self.role, cause))
        if role is None:
            raise InvariantError(
                f"leadership: {self.role} does not expect {cause.__name__}; "
                f"history: {list(self.history)}"
            )
        self.history.append(f"{self.role.value} -> {role.value} ({cause.__name__}, {self.term})")
        self.role = role

    # --- asking the arbiter ---------------------------------------------------------------------

    def _on_lead_due(self, now: float) -> list[LeadershipEffect]:
        """Ask for the lead, or renew it, and repeat a commit whose answer was lost. This is due
        every fifth of a lease."""
        effects: list[LeadershipEffect] = []
        if self._unheard and self._committing is not None and self.leads:
            self._unheard = False
            effects.append(self._committing)
        if self._asking is None and self.role is Role.FOLLOWING:
            effects += self._ask_lead(None, now)
        elif self._asking is None and self.leads and not self.lasts:
            assert self.entry is not None
            effects.append(self._ask(AskRenew(self._number(), self.entry), now))
        return effects

    def _number(self) -> int:
        self._asks += 1
        return self._asks

    def _ask(
        self, ask: AskLead | AskRenew | AskRead | AskResign, now: float
    ) -> AskLead | AskRenew | AskRead | AskResign:
        self._asking, self._asked_at = ask, now
        return ask

    def _ask_lead(self, despite: Entry | None, now: float) -> list[LeadershipEffect]:
        return [self._ask(AskLead(self._number(), despite), now)]

    def _answered(self, ask: object) -> bool:
        """Whether the answer is to the ask under way. If so, another ask may follow."""
        if ask is None or ask != self._asking:
            return False
        self._asking = None
        return True

    # --- leading --------------------------------------------------------------------------------

    def _on_lead_granted(self, event: LeadGranted, now: float) -> list[LeadershipEffect]:
        asked_at = self._asked_at
        if not self._answered(event.ask):
            return []
        entry = event.entry
        self.known_term = max(self.known_term, entry.term)
        over = self.role is not Role.FOLLOWING or entry.term <= self.term
        if over or now >= asked_at + event.lease_s:
            # The grant is too late, or of a term in which this application has stepped down.
            self.term = max(self.term, entry.term)
            return [self._ask(AskResign(self._number(), entry), now)]
        self._become(LeadGranted)
        self.term, self.entry = entry.term, entry
        self.lease_until = asked_at + event.lease_s
        self.leader = None
        return [BeginTerm(entry)]

    def _on_term_taken(self, event: TermTaken) -> list[LeadershipEffect]:
        if self.role is Role.TAKING_OVER and event.term == self.term:
            self._become(TermTaken)
        return []

    def _on_renewed(self, event: Renewed) -> list[LeadershipEffect]:
        asked_at = self._asked_at
        if self._answered(event.ask) and self.leads and event.ask.entry.term == self.term:
            self.lease_until = max(self.lease_until, asked_at + event.lease_s)
        return []

    def _on_lease_lost(self, event: LeaseLost) -> list[LeadershipEffect]:
        if not self._answered(event.ask):
            return []
        assert event.ask is not None
        return self._lose(event) if self.leads and event.ask.entry.term == self.term else []

    def _lose(self, event: LeaseLost | CommitRefused) -> list[LeadershipEffect]:
        """The term is over. What was to be committed in it is dropped."""
        self._become(type(event))
        self.entry = self._committing = self._next = None
        self._unheard = False
        return [EndTerm(self.term, event.reason)]

    def _on_resigned(self, event: Resigned, now: float) -> list[LeadershipEffect]:
        if self._answered(event.ask) and self.role is Role.FOLLOWING:
            return self._ask_lead(None, now)
        return []

    # --- committing -----------------------------------------------------------------------------

    def _on_wanted(self, event: CommitWanted | EndWanted) -> list[LeadershipEffect]:
        if self.role not in (Role.LEADING, Role.COMMITTING) or event.term != self.term:
            return []  # the term is over, or the end is being committed
        if not (self.role is Role.COMMITTING and isinstance(event, CommitWanted)):
            self._become(type(event))
        if self._committing is not None:
            self._next = event
            return []
        return self._commit(event)

    def _commit(self, wanted: CommitWanted | EndWanted) -> list[LeadershipEffect]:
        assert self.entry is not None
        ends = isinstance(wanted, EndWanted)
        self._committing = AskCommit(self._number(), self.entry, wanted.value, ends)
        return [self._committing]

    def _on_committed(self, event: Committed) -> list[LeadershipEffect]:
        if event.ask != self._committing:
            return []
        self.entry, self._committing, self._unheard = event.entry, None, False
        if event.ask.ends:
            self._become(EndCommitted)
            return [CommitDone(), AskResign(self._number(), event.entry), LeadershipOver()]
        wanted, self._next = self._next, None
        if wanted is None:
            self._become(Committed)
            return [CommitDone()]
        return [CommitDone(), *self._commit(wanted)]

    def _on_commit_refused(self, event: CommitRefused) -> list[LeadershipEffect]:
        return self._lose(event) if event.ask == self._committing else []

    def _on_unreachable(self, event: ArbiterUnreachable) -> list[LeadershipEffect]:
        """It is unknown whether the ask took effect. The same commit is asked again: a different
        one would find the first in the arbiter, and take it for a successor's."""
        if isinstance(event.ask, AskCommit):
            self._unheard = event.ask == self._committing
        else:
            self._answered(event.ask)
        return []

    # --- following ------------------------------------------------------------------------------

    def _on_lead_refused(self, event: LeadRefused, now: float) -> list[LeadershipEffect]:
        if not self._answered(event.ask) or self.role is not Role.FOLLOWING:
            return []
        return [self._ask(AskRead(self._number()), now)] if self.leader is None else []

    def _on_leader_missed(self, event: LeaderMissed, now: float) -> list[LeadershipEffect]:
        """The connection to the leader broke: find out which application leads now."""
        self.leader = None
        if not event.search or self.role is not Role.FOLLOWING or self._asking is not None:
            return []
        return [self._ask(AskRead(self._number()), now)]

    def _on_entry_read(self, event: EntryRead) -> list[LeadershipEffect]:
        self.known_term = max(self.known_term, event.entry.term)
        if not self._answered(event.ask) or self.role is not Role.FOLLOWING:
            return []
        return [FollowEntry(event.entry)]

    def _on_leader_gone(self, event: LeaderGone, now: float) -> list[LeadershipEffect]:
        """No process listens at the leader's address: it is gone, and its lease need not expire
        first. If it lives after all, its next commit fails."""
        if self.role is not Role.FOLLOWING or self._asking is not None:
            return []
        return self._ask_lead(event.entry, now)

    def _on_flow_ended(self) -> list[LeadershipEffect]:
        if self.role not in (Role.FOLLOWING, Role.TAKING_OVER):
            return []
        entry = self.entry
        self._become(FlowEnded)
        given_up = [AskResign(self._number(), entry)] if entry is not None else []
        return [*given_up, LeadershipOver()]

    def check_invariants(self) -> None:
        """Raise if something does not hold that must hold between events."""
        in_term = self.role in (Role.TAKING_OVER, Role.LEADING, Role.COMMITTING, Role.ENDING)
        wrong = {
            "leads without an entry": in_term and self.entry is None,
            "leads in another term than its entry's": in_term
            and self.entry is not None
            and self.entry.term != self.term,
            "commits without having asked for it": self.role in (Role.COMMITTING, Role.ENDING)
            and self._committing is None,
            "has asked for a commit without committing": self._committing is not None
            and self.role in (Role.FOLLOWING, Role.TAKING_OVER, Role.LEADING),
        }
        found = [what for what, is_wrong in wrong.items() if is_wrong]
        if found:
            raise InvariantError(f"leadership: {'; '.join(found)}: {list(self.history)}")


def diagram() -> str:
    """The table as a Mermaid diagram, for the documentation."""
    lines = ["stateDiagram-v2", "  [*] --> FOLLOWING"]
    lines += [f"  {a.name} --> {b.name}: {cause.__name__}" for (a, cause), b in TABLE.items()]
    return "\n".join([*lines, "  OVER --> [*]"])
