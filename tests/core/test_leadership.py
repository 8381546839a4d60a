"""Who leads: answers of an arbiter in, asks and decisions out."""

from pathlib import Path
from typing import Any

import pytest

from holdfast.arbiter import Entry
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
from holdfast.core.leadership import TABLE, Leadership, Role, diagram

LEASE = 10.0
FIRST = Entry(1, 1, "me")
OTHERS = Entry(5, 3, "other", b"known")


class Party:
    """A machine and its clock."""

    def __init__(self) -> None:
        self.machine, self.now = Leadership("me"), 0.0

    def on(self, event: LeadershipEvent) -> list[LeadershipEffect]:
        effects = self.machine.handle(event, self.now)
        self.machine.check_invariants()
        return effects

    @property
    def role(self) -> Role:
        return self.machine.role


def ask_of(effects: list[LeadershipEffect], kind: type) -> Any:
    (found,) = (e for e in effects if isinstance(e, kind))
    return found


def leading(entry: Entry = FIRST) -> Party:
    party = Party()
    ask = ask_of(party.on(LeadDue()), AskLead)
    assert party.on(LeadGranted(ask, entry, LEASE)) == [BeginTerm(entry)]
    assert party.on(TermTaken(entry.term)) == []
    assert party.role is Role.LEADING
    return party


def after(entry: Entry, value: bytes) -> Entry:
    return Entry(entry.version + 1, entry.term, entry.holder, value)


# --- the lease ----------------------------------------------------------------------------------


def test_it_asks_for_the_lead_and_takes_over_before_it_leads() -> None:
    party = Party()
    assert party.on(LeadDue()) == [AskLead(1, None)]
    assert party.on(LeadDue()) == [], "one ask at a time"
    assert party.on(LeadGranted(AskLead(1, None), FIRST, LEASE)) == [BeginTerm(FIRST)]
    assert party.role is Role.TAKING_OVER
    assert party.on(CommitWanted(1, b"early")) == [], "nothing is known yet"
    assert party.on(TermTaken(1)) == [] and party.role is Role.LEADING
    assert party.on(LeadDue()) == [AskRenew(2, FIRST)]


def test_the_lease_counts_from_when_it_was_asked_for() -> None:
    party = leading()
    party.now = 4.0
    renew = ask_of(party.on(LeadDue()), AskRenew)
    party.now = 9.0
    assert party.on(Renewed(renew, LEASE)) == []
    party.now = 13.9
    assert ask_of(party.on(LeadDue()), AskRenew)
    assert party.role is Role.LEADING
    party.now = 14.0
    (ended,) = party.on(LeaderMissed())
    assert ended == EndTerm(1, "its lease has expired by its own clock")
    assert party.role is Role.FOLLOWING


def test_whatever_comes_after_the_lease_finds_no_leader() -> None:
    """A process that was stopped reads first what came meanwhile."""
    party = leading()
    party.now = 10.0
    ended, *rest = party.on(EndWanted(1, b"over"))
    assert isinstance(ended, EndTerm) and rest == []


def test_a_grant_that_comes_too_late_is_given_up() -> None:
    party = Party()
    ask = ask_of(party.on(LeadDue()), AskLead)
    party.now = LEASE
    assert party.on(LeadGranted(ask, FIRST, LEASE)) == [AskResign(2, FIRST)]
    assert party.role is Role.FOLLOWING
    assert party.on(Resigned(AskResign(2, FIRST))) == [AskLead(3, None)]
    again = Entry(2, 2, "me")
    assert party.on(LeadGranted(AskLead(3, None), again, LEASE)) == [BeginTerm(again)]


def test_no_term_is_led_twice() -> None:
    """The arbiter gives a leader that asks again the term that it has."""
    party = leading()
    party.now = LEASE
    ended, ask = party.on(LeadDue())
    assert isinstance(ended, EndTerm) and isinstance(ask, AskLead)
    (resign,) = party.on(LeadGranted(ask, FIRST, LEASE))
    assert resign == AskResign(ask.number + 1, FIRST)
    assert party.role is Role.FOLLOWING


def test_a_lease_that_the_arbiter_has_ended() -> None:
    party = leading()
    renew = ask_of(party.on(LeadDue()), AskRenew)
    assert party.on(LeaseLost(renew, "gone")) == [EndTerm(1, "gone")]


def test_the_loss_of_an_old_lease_means_nothing_in_a_new_term() -> None:
    party = leading()
    party.now = 9.0
    renew = ask_of(party.on(LeadDue()), AskRenew)
    party.now = 10.0
    (ended,) = party.on(LeadDue())
    assert isinstance(ended, EndTerm), "the ask under way is still to be answered"
    assert party.on(LeaseLost(renew, "late")) == []
    ask = ask_of(party.on(LeadDue()), AskLead)
    party.on(LeadGranted(ask, Entry(2, 2, "me"), LEASE))
    assert party.on(LeaseLost(renew, "even later")) == []
    assert party.on(Renewed(renew, 1e9)) == [] and party.machine.lease_until == 20.0
    assert party.role is Role.TAKING_OVER


def test_who_is_alone_leads_for_ever() -> None:
    party = Party()
    party.on(LeadGranted(ask_of(party.on(LeadDue()), AskLead), FIRST, float("inf")))
    party.on(TermTaken(1))
    party.now = 1e12
    assert party.machine.lasts and party.on(LeadDue()) == []


# --- committing ---------------------------------------------------------------------------------


def test_one_commit_at_a_time_and_then_the_latest() -> None:
    party = leading()
    (first,) = party.on(CommitWanted(1, b"a"))
    assert first == AskCommit(2, FIRST, b"a", False) and party.role is Role.COMMITTING
    assert party.on(CommitWanted(1, b"b")) == []
    assert party.on(CommitWanted(1, b"c")) == []
    one = after(FIRST, b"a")
    done, second = party.on(Committed(first, one))
    assert (done, second) == (CommitDone(), AskCommit(3, one, b"c", False))
    assert party.role is Role.COMMITTING
    assert party.on(Committed(second, after(one, b"c"))) == [CommitDone()]
    assert party.role is Role.LEADING


def test_a_commit_that_is_not_answered_is_said_again_as_it_was() -> None:
    """Whether it went through is not known: anything else might be taken for a successor's."""
    party = leading()
    (ask,) = party.on(CommitWanted(1, b"a"))
    assert party.on(ArbiterUnreachable(ask, "away")) == []
    assert party.on(CommitWanted(1, b"b")) == []
    assert party.on(LeadDue()) == [ask, AskRenew(3, FIRST)]
    assert party.on(LeadDue()) == [], "it is under way"


def test_a_refused_commit_ends_the_term() -> None:
    party = leading()
    (ask,) = party.on(CommitWanted(1, b"a"))
    party.on(CommitWanted(1, b"b"))
    assert party.on(CommitRefused(ask, "superseded")) == [EndTerm(1, "superseded")]
    assert party.on(Committed(ask, after(FIRST, b"a"))) == [], "it answers nothing any more"


def test_an_answer_that_comes_after_the_term_commits_nothing() -> None:
    """Step-down while a commit is under way, and a lead again: the entry is the arbiter's."""
    party = leading()
    (ask,) = party.on(CommitWanted(1, b"a"))
    party.now = LEASE
    ended, lead = party.on(LeadDue())
    assert isinstance(ended, EndTerm)
    assert party.on(Committed(ask, after(FIRST, b"a"))) == []
    second = Entry(3, 2, "me", b"a")
    assert party.on(LeadGranted(lead, second, LEASE)) == [BeginTerm(second)]  # type: ignore[arg-type]
    party.on(TermTaken(2))
    assert party.on(Committed(ask, after(FIRST, b"a"))) == []
    assert party.on(CommitRefused(ask, "late")) == [] and party.machine.entry == second


def test_what_was_wanted_in_an_old_term_is_not_committed_in_a_new_one() -> None:
    party = leading(Entry(4, 2, "me"))
    assert party.on(CommitWanted(1, b"old")) == []
    assert party.on(EndWanted(1, b"old")) == [] and party.role is Role.LEADING


# --- the end ------------------------------------------------------------------------------------


def test_the_end_is_over_when_it_is_committed() -> None:
    party = leading()
    (ask,) = party.on(EndWanted(1, b"end"))
    assert ask == AskCommit(2, FIRST, b"end", True) and party.role is Role.ENDING
    assert party.on(CommitWanted(1, b"more")) == [], "nothing comes after it"
    end = after(FIRST, b"end")
    assert party.on(Committed(ask, end)) == [CommitDone(), AskResign(3, end), LeadershipOver()]
    assert party.role is Role.OVER
    party.now = 1e9
    assert party.on(LeadDue()) == []


def test_a_refused_end_ends_the_term_and_not_the_flow() -> None:
    party = leading()
    (ask,) = party.on(EndWanted(1, b"end"))
    assert party.on(CommitRefused(ask, "superseded")) == [EndTerm(1, "superseded")]
    assert party.role is Role.FOLLOWING


def test_a_lease_may_end_before_the_term_is_taken() -> None:
    party = Party()
    ask = ask_of(party.on(LeadDue()), AskLead)
    party.on(LeadGranted(ask, FIRST, LEASE))
    assert party.role is Role.TAKING_OVER
    party.now = LEASE
    ended, _ = party.on(LeadDue())
    assert isinstance(ended, EndTerm) and party.role is Role.FOLLOWING


def test_the_end_waits_for_the_commit_before_it() -> None:
    party = leading()
    (first,) = party.on(CommitWanted(1, b"a"))
    assert party.on(EndWanted(1, b"end")) == [] and party.role is Role.ENDING
    one = after(FIRST, b"a")
    assert party.on(Committed(first, one)) == [CommitDone(), AskCommit(3, one, b"end", True)]
    assert party.role is Role.ENDING


def test_a_leader_without_an_arbiter_does_not_end_the_flow() -> None:
    party = leading()
    (ask,) = party.on(EndWanted(1, b"end"))
    party.on(ArbiterUnreachable(ask, "away"))
    party.now = LEASE
    ended, _ = party.on(LeadDue())
    assert isinstance(ended, EndTerm) and party.role is Role.FOLLOWING


def test_a_term_that_is_granted_after_the_end_is_given_up() -> None:
    party = Party()
    lead = ask_of(party.on(LeadDue()), AskLead)
    assert party.on(FlowEnded()) == [LeadershipOver()]
    assert party.on(LeadGranted(lead, FIRST, LEASE)) == [AskResign(2, FIRST)]
    assert party.role is Role.OVER


# --- following ----------------------------------------------------------------------------------


def test_it_follows_whoever_leads() -> None:
    party = Party()
    lead = ask_of(party.on(LeadDue()), AskLead)
    assert party.on(LeadRefused(lead)) == [AskRead(2)]
    assert party.on(EntryRead(AskRead(2), OTHERS)) == [FollowEntry(OTHERS)]
    assert party.on(LeaderFound("other")) == []
    assert party.machine.known_term == 3
    lead = ask_of(party.on(LeadDue()), AskLead)
    assert party.on(LeadRefused(lead)) == [], "it is connected"
    assert party.on(LeaderMissed()) == [AskRead(4)]
    assert party.on(EntryRead(AskRead(4), OTHERS)) == [FollowEntry(OTHERS)]
    assert party.on(LeaderGone(OTHERS)) == [AskLead(5, OTHERS)]


def test_a_lost_leader_is_not_searched_for_if_that_is_not_wanted() -> None:
    party = Party()
    party.on(LeaderFound("other"))
    assert party.on(LeaderMissed(search=False)) == []
    assert party.machine.leader is None


def test_the_arbiter_may_be_away_for_whoever_follows() -> None:
    party = Party()
    lead = ask_of(party.on(LeadDue()), AskLead)
    assert party.on(ArbiterUnreachable(lead, "away")) == []
    assert party.on(LeadDue()) == [AskLead(2, None)]


# --- the table ----------------------------------------------------------------------------------


def test_every_role_is_reached_and_only_the_end_is_final() -> None:
    assert set(TABLE.values()) == set(Role)
    assert {role for role, _ in TABLE} == set(Role) - {Role.OVER}


def test_what_is_not_in_the_table_cannot_be() -> None:
    from holdfast.errors import InvariantError

    with pytest.raises(InvariantError, match="does not expect"):
        Leadership("me")._become(Committed)


def test_the_diagram_in_the_documentation_is_that_of_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "control.md"
    assert f"```mermaid\n{diagram()}\n```" in page.read_text()
