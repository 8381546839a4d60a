"""Bugs to plant: each is a possible mistake in the protocol, and is planted by itself.

A simulator that finds nothing proves nothing unless it finds bugs that are there. It must catch
every bug of this module within the bug's number of seeds (`tests/sim/test_explore.py`; with every
change, by the seed that `tests/support/caught.json` stores). ``holdfast sim --bug NAME`` shows how.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.control.decisions import PendingDecisions
from holdfast.control.leading import Leading
from holdfast.control.node import ControlNode
from holdfast.control.orders import dismissals
from holdfast.core.controller import Controller
from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import CommitView, FenceSite, PublishRecord, StartFlow
from holdfast.core.exchange import Consumer, Producer
from holdfast.core.ids import NO_EPOCH, Epoch, GroupId, SiteId
from holdfast.core.layout import PartitionGroup, View
from holdfast.core.leadership import Leadership
from holdfast.core.messages import Ack, BundleKey
from holdfast.core.protection_change import ProtectionChange
from holdfast.core.records import EpochRecord
from holdfast.core.replica import Replica
from holdfast.core.roster import SiteRoster
from holdfast.core.sequencer import Sequencer
from holdfast.core.site_exchanges import SiteExchanges
from holdfast.core.upstream import Needs, Search
from holdfast.engine.batches import Track
from holdfast.engine.state import StateTable
from holdfast.engine.watermark import Watermark
from holdfast.lab.sim import push_bugs
from holdfast.lab.sim.faults import Fault
from holdfast.lab.sim.move_bugs import MOVE_BUGS
from holdfast.lab.sim.planted import Bug
from holdfast.lab.sim.site_shell import SiteShell
from holdfast.site.egress import Egress
from holdfast.site.handover import Incoming, IncomingCheckpoint
from holdfast.site.ingress import Ingress
from holdfast.site.node import SiteNode
from holdfast.site.push_log import PushLog
from holdfast.site.replica_reports import ReplicaReports
from holdfast.site.stages import TaskRunner
from holdfast.site.transfers import Transfers


def _no_acks_to_followers(right: Any) -> Any:
    def acks(self: Consumer, *args: Any) -> Any:
        return [a for a in right(self, *args) if a.ack.subscribe]

    return acks


def _one_too_far(right: Any) -> Any:
    def on_ack(self: Producer, site: SiteId, ack: Ack) -> Any:
        cursor = self.lanes[ack.consumer].cursors[site]
        begins = ack.subscribe and not cursor.subscribed and cursor.received >= 0
        effects = right(self, site, ack)
        return effects[1:] if begins else effects

    return on_ack


def _not_fenced(_: Any) -> Any:
    def fence(self: SiteShell, node: SiteNode, view: View) -> None: ...

    return fence


def _not_committed(right: Any) -> Any:
    def commit(self: Leading) -> Any:
        views = [e for e in self.decisions.waiting if isinstance(e, CommitView)]
        return [*self._execute(views), *right(self)]

    return commit


def _within_an_epoch(right: Any) -> Any:
    def ordered(self: Dataflow, event: Any) -> Any:
        task = self.tasks.get(event.task)
        if task is not None and task.has_state:
            task.donor.order(event.joiner, task.finished)
            return self._handovers(task)
        return right(self, event)

    return ordered


def _trimmed_early(_: Any) -> Any:
    def trim(self: Producer, lane: Any) -> None:
        stable = max((t.received for t in lane.cursors.values()), default=-1)
        while lane.kept and lane.kept[0].epoch <= stable:
            lane.kept.popleft()
            lane.trimmed += 1

    return trim


def _nothing_kept(_: Any) -> Any:
    def export(self: Producer, after: Epoch | None = None) -> Any:
        return {consumer: [] for consumer in self.lanes}

    return export


def _twice(right: Any) -> Any:
    def on_bundle(self: Consumer, key: BundleKey, bundle: Any) -> bool:
        if key.epoch <= self.received.get(key.producer, -1):
            waiting = self._arrived.get(key.epoch, {})
            waiting.get(key.producer, []).append(bundle)
            return True
        return bool(right(self, key, bundle))

    return on_bundle


def _credit_leaks(right: Any) -> Any:
    def on_view(self: Consumer, *args: Any, **settings: Any) -> Any:
        self.window = max(0, self.window - 1)
        return right(self, *args, **settings)

    return on_view


def _published_early(right: Any) -> Any:
    def cut_all(self: Sequencer) -> Any:
        return [e if isinstance(e, PublishRecord) else PublishRecord(e.record) for e in right(self)]

    return cut_all


def _not_passed_again(right: Any) -> Any:
    def pass_all(self: Sequencer) -> Any:
        return []

    return pass_all


def _joiners_are_not_counted(_: Any) -> Any:
    def count_replicas(self: SiteExchanges, producer: Producer) -> None:
        assert self._view is not None
        groups = self._view.groups[self._shape.consumer_of[producer.exchange]]
        producer.on_view(
            {GroupId(j): {s: c.joined_view_of(s) for s in c.replicas} for j, c in enumerate(groups)}
        )

    return count_replicas


def _acked_before_it_came(right: Any) -> Any:
    def ack(self: Consumer, *args: Any) -> Any:
        found = right(self, *args)
        return replace(found, ack=found.ack._replace(received=Epoch(found.ack.received + 1)))

    return ack


def _follower_drops_rows(right: Any) -> Any:
    def take(self: Egress, epoch: int, batch: Any) -> None:
        right(self, epoch, batch)
        if not self.leads:
            self._held.clear()

    return take


def _the_same_term(right: Any) -> Any:
    def resume(self: Controller, view: View, term: int, *args: Any) -> Any:
        effects = right(self, view, term, *args)
        self.term = term - 1
        return effects

    return resume


def _numbers_of_the_living(right: Any) -> Any:
    def resume(self: SiteRoster, addresses: Any, domains: Any, dead: Any, next_id: Any) -> None:
        right(self, addresses, domains, dead, SiteId(1 + max(addresses)))

    return resume


def _any_view(_: Any) -> Any:
    def replaces(self: View, other: Any) -> bool:
        return True

    return replaces


def _silence_stops_the_flow(right: Any) -> Any:
    def failed(self: Controller, event: Any) -> Any:
        return right(self, replace(event, certain=True))

    return failed


def _state_stays_behind(right: Any) -> Any:
    def take(self: Incoming, plan: Any, message: Any, body: Any) -> None:
        if type(message).__name__ != "HandOverState":
            right(self, plan, message, body)

    return take


def _chain_not_awaited(_: Any) -> Any:
    def is_whole(self: ReplicaReports, task: Any) -> bool:
        return True

    return is_whole


def _leader_forgets(right: Any) -> Any:
    def lead(self: Sequencer) -> None:
        right(self)
        for split in self.splits.values():
            split.cut = max(0, split.cut - 1)
            split.next_offset = split.cut

    return lead


def _store_not_asked(_: Any) -> Any:
    def lead(self: Egress, term: int) -> None:
        if not self.leads:
            self.leads = True
            self.writer, _ = self._sink.resume(self._authority, self._schema, self.durable)
            for epoch, batch in self.held:
                self._write(epoch, batch)

    return lead


def _nothing_held(_: Any) -> Any:
    def held(self: TaskRunner) -> Any:
        return []

    return held


def _largest_time_of_any_split(right: Any) -> Any:
    def held_at(self: Watermark, but: int | None = None) -> int:
        return right(self) if but is None else Track.END

    return held_at


def _own_rows_only(right: Any) -> Any:
    def track(self: Ingress, record: EpochRecord) -> Track:
        own = tuple(r for r in record.ranges if r.source == self.stage.id)
        return right(self, replace(record, ranges=own))

    return track


def _joiners_step_in(right: Any) -> Any:
    def without(self: PartitionGroup, gone: Any) -> PartitionGroup:
        left: PartitionGroup = right(self, gone)
        return left if left.replicas else replace(left, replicas=left.joining, joining=())

    return without


def _all_in_the_last(right: Any) -> Any:
    def split(self: TaskRunner, outputs: Any, tracks: Any, begins: Any) -> Any:
        return right(self, outputs, tracks, [begins[0]] * len(begins))

    return split


def _as_if_stateless(_: Any) -> Any:
    def came_from(self: TaskRunner, epoch: int) -> int:
        return epoch

    return came_from


def _dropped_when_received(_: Any) -> Any:
    def stable(self: Producer, lane: Any) -> Epoch:
        return min((t.received for t in lane.cursors.values()), default=NO_EPOCH)

    return stable


def _all_levels_alike(right: Any) -> Any:
    def levels(self: Replica, count: int, received: Epoch) -> Any:
        found = right(self, count, received)
        return (found[0],) * len(found)

    return levels


def _one_is_asked(right: Any) -> Any:
    def begins(self: Search, wanted: Any) -> Any:
        return right(self, dict.fromkeys(list(wanted)[:1]))

    return begins


def _needs_off_by_one(right: Any) -> Any:
    def at(self: Needs, epoch: Epoch) -> Epoch:
        return right(self, Epoch(epoch + 1))

    return at


def _half_a_checkpoint(_: Any) -> Any:
    def take(self: IncomingCheckpoint, plan: Any, message: Any, body: memoryview) -> None:
        Incoming.take(self, plan, message, body)

    return take


def _nothing_removed(right: Any) -> Any:
    def removed(self: StateTable, whose: str) -> Any:
        return right(self).slice(0, 0)

    return removed


def _output_left_out_of_checkpoints(right: Any) -> Any:
    def export(self: Producer, after: Epoch | None = None) -> Any:
        found = right(self, after)
        return found if after is None else {consumer: [] for consumer in found}

    return export


def _standbys_are_not_counted(right: Any) -> Any:
    def count_replicas(self: SiteExchanges, producer: Producer) -> None:
        assert self._view is not None
        groups = self._view.groups[self._shape.consumer_of[producer.exchange]]
        producer.on_view(
            {
                GroupId(j): {s: c.joined_view_of(s) for s in c.replicas + c.joining}
                for j, c in enumerate(groups)
            }
        )

    return count_replicas


def _one_standby_is_enough(right: Any) -> Any:
    def count_replicas(self: SiteExchanges, producer: Producer) -> None:
        assert self._view is not None
        groups = self._view.groups[self._shape.consumer_of[producer.exchange]]
        producer.on_view(
            {
                GroupId(j): {
                    s: c.joined_view_of(s) for s in c.replicas + c.joining + c.standbys[:1]
                }
                for j, c in enumerate(groups)
            }
        )

    return count_replicas


def _removed_keys_are_named_once(right: Any) -> Any:
    def snapshot(self: StateTable, *args: Any) -> Any:
        self._removed = {reader: [] for reader in self._removed}
        return right(self, *args)

    return snapshot


def _first_changes_left_out(right: Any) -> Any:
    def snapshot(
        self: StateTable, partitions: Any = None, after: int | None = None, *args: Any
    ) -> Any:
        return right(self, partitions, None if after is None else after + 1, *args)

    return snapshot


def _retention_not_awaited(_: Any) -> Any:
    def lacks_retention(self: ProtectionChange, task: Any) -> bool:
        return False

    return lacks_retention


def _any_state_is_taken(_: Any) -> Any:
    def discard_state(self: Transfers, task: Any) -> None: ...

    return discard_state


def _failure_is_said_once(_: Any) -> Any:
    def fail(self: ReplicaReports, task: Any, site: Any, reason: str) -> None:
        self._tell(task, site, "failed", reason)

    return fail


def _follows_what_was_received(_: Any) -> Any:
    return property(lambda self: self.reached(0))


def _end_not_committed(right: Any) -> Any:
    def commit(self: Leading) -> Any:
        early = dismissals(self.audience) if self.ends else []
        return [*early, *right(self)]

    return commit


def _start_not_committed(right: Any) -> Any:
    def commit(self: Leading) -> Any:
        starts = [e for e in self.decisions.waiting if isinstance(e, StartFlow)]
        return [*self._execute(starts), *right(self)]

    return commit


def _fences_outlive_the_term(right: Any) -> Any:
    def decide(self: ControlNode, effects: Any) -> None:
        assert self.leading is not None
        term, kept = self.leading.term, self.__dict__.setdefault("to_fence", {})
        if not self.leading.frozen:
            kept.pop(term, None)
        old = [e for other in list(kept) if other != term for e in kept.pop(other)]
        kept.setdefault(term, []).extend(e for e in effects if isinstance(e, FenceSite))
        right(self, [*old, *effects])

    return decide


def _lease_not_watched(_: Any) -> Any:
    def handle(self: Leadership, event: Any, now: float) -> Any:
        self.lease_until = float("inf") if self.leads else self.lease_until
        return self._handle(event, now)

    return handle


def _overtaken_views_are_given_out(_: Any) -> Any:
    def add(self: PendingDecisions, effect: Any) -> None:
        self.waiting.append(effect)

    return add


_passive = partial(Bug, flow="times", protocol="passive", kinds=("crash", "crash of two"))
_standbys = partial(Bug, flow="times", protocol="passive-2", kinds=("crash of two",), beyond=0.0)
_upstream = partial(Bug, flow="times", protocol="upstream", kinds=("crash", "crash of two"))
_apps = partial(Bug, apps=2, kinds=("crash", "controller"))
_changes = partial(Bug, flow="times", kinds=("crash", "crash of two"))
_pushed = partial(Bug, flow="pushed", protocol="triples", kinds=("crash", "crash of two"))

_FAILED_REPLICA_IS_NOT_COMMITTED = (
    Fault("crash", 0.015, who=1),
    Fault("arbiter", 0.022, "transferring", seconds=0.08),
    Fault("reset", 0.022, "transferring", who=2),
    Fault("controller", 0.075),
)

_SILENT_WITHOUT_ARBITER = (
    Fault("cut off", 0.02, who=1, seconds=0.15),
    Fault("arbiter", 0.08, seconds=0.25),
)
_LOST_AT_THE_START = (
    Fault("controller", 0.0),
    Fault("crash", 0.06, who=1),
)
_CUT_OFF = (Fault("no arbiter", 0.03, seconds=0.4), Fault("crash", 0.16, who=1))

_SENT_TO_ONE = (
    Fault("block", 0.03, who=0, other=0, seconds=0.08),
    Fault("crash", 0.06, who=0),
)
_SENT_TO_NOBODY = (Fault("block", 0.03, who=0, other=1, seconds=0.08), *_SENT_TO_ONE)

BUGS = [
    Bug("forgotten ack", "consumers send no acks to replicas that do not send to them",
        Consumer, "acks", _no_acks_to_followers),
    Bug("replay off by one", "a producer that begins to send leaves the first bundle out",
        Producer, "on_ack", _one_too_far),
    Bug("no fencing", "sites accept bundles from sites that are not members",
        SiteShell, "fence", _not_fenced, kinds=("zombie",)),
    Bug("view not committed", "a leader sends a view while the arbiter is away",
        Leading, "_commit", _not_committed, kinds=("arbiter", "crash")),
    Bug("snapshot within an epoch", "a donor hands state over between two bundles of an epoch",
        Dataflow, "_on_catch_up_ordered", _within_an_epoch),
    Bug("trim too early", "a producer drops a bundle when the first replica has it",
        Producer, "_trim", _trimmed_early),
    Bug("output left out", "a donor does not hand over bundles that are not stable",
        Producer, "export", _nothing_kept),
    Bug("dedupe dropped", "a consumer takes a bundle twice if it arrives twice",
        Consumer, "on_bundle", _twice),
    Bug("credit leaks", "a consumer loses credit with every view",
        Consumer, "on_view", _credit_leaks),
    Bug("record on one replica", "the first sequencer publishes a record before the others have it",
        Sequencer, "_cut_all", _published_early),
    Bug("records not passed again", "after a change of the chain, records are not passed on again",
        Sequencer, "_pass_all", _not_passed_again, kinds=("crash",)),
    Bug("joiner not counted", "producers do not keep the bundles that a joining replica needs",
        SiteExchanges, "_count_replicas", _joiners_are_not_counted),
    Bug("ack ahead", "a consumer acknowledges a bundle that has not arrived",
        Consumer, "ack", _acked_before_it_came),
    Bug("follower drops rows", "a follower of a sink drops rows that are not durable yet",
        Egress, "take", _follower_drops_rows, kinds=("crash",)),
    Bug("same term", "a new controller acts in the old one's term",
        Controller, "resume", _the_same_term, kinds=("controller", "crash")),
    Bug("number used twice", "a new controller gives sites numbers that dead ones had",
        SiteRoster, "resume", _numbers_of_the_living, kinds=("controller", "crash")),
    Bug("any view", "a site adopts an older view",
        View, "replaces", _any_view, kinds=("old leader", "crash")),
    Bug("silence stops the flow", "a silent site counts as dead for certain",
        Controller, "_on_sites_failed", _silence_stops_the_flow, kinds=("crash", "cut off")),
    Bug("state left behind", "a new replica starts with empty tables",
        Incoming, "take", _state_stays_behind),
    Bug("new leader cuts again", "a sequencer that takes over cuts rows again that are in an epoch",
        Sequencer, "_lead", _leader_forgets, kinds=("crash",)),
    Bug("chain not awaited", "a replica of the sequencer counts before it is in the chain",
        ReplicaReports, "_is_whole", _chain_not_awaited, kinds=("crash",)),
    Bug("failure said once", "a site does not tell a new controller that a replica has failed",
        ReplicaReports, "fail", _failure_is_said_once, faults=_FAILED_REPLICA_IS_NOT_COMMITTED),
    Bug("store not asked", "a new leader of a sink writes rows again that are durable",
        Egress, "lead", _store_not_asked, kinds=("crash",)),
    Bug("held rows left behind", "a new replica of a sink lacks the rows that are not durable yet",
        TaskRunner, "held", _nothing_held, kinds=("crash",), seeds=200),
    Bug("largest time of any split", "splits do not wait for each other's event times",
        Watermark, "_held_at", _largest_time_of_any_split, flow="sources", seeds=10),
    Bug("watermark of own rows", "an ingress ignores the event times of other sources",
        Ingress, "_track", _own_rows_only, flow="sources", seeds=10),
    Bug("joiner steps in", "a joining replica counts when no other is left",
        PartitionGroup, "without", _joiners_step_in, kinds=("crash",), beyond=1.0),
    _passive("half a checkpoint", "a standby uses a checkpoint before it is complete",
        IncomingCheckpoint, "take", _half_a_checkpoint, seeds=200),
    _passive("removed keys stay", "a checkpoint does not name removed keys",
        StateTable, "removed", _nothing_removed),
    _passive("checkpoint without output", "a checkpoint lacks the bundles that are not stable",
        Producer, "export", _output_left_out_of_checkpoints),
    _passive("standby not counted", "producers do not keep the bundles since the last checkpoint",
        SiteExchanges, "_count_replicas", _standbys_are_not_counted),
    _passive("changes left out", "a checkpoint lacks the changes right after the one before",
        StateTable, "snapshot", _first_changes_left_out),
    _standbys("one standby is enough", "producers drop bundles that the first standby has",
        SiteExchanges, "_count_replicas", _one_standby_is_enough),
    _standbys("removed keys named once", "only one of two standbys learns of removed keys",
        StateTable, "snapshot", _removed_keys_are_named_once),
    _upstream("state not counted", "producers drop input that the state comes from",
        TaskRunner, "came_from", _as_if_stateless),
    _upstream("one of many", "all output of epochs processed together goes into the last one",
        TaskRunner, "_split", _all_in_the_last),
    _upstream("log dropped", "producers drop input when it is received",
        Producer, "_stable", _dropped_when_received),
    _upstream("levels alike", "producers drop input that a later stage still depends on",
        Replica, "levels", _all_levels_alike),
    _upstream("one log asked", "a task is rebuilt from the epoch that its first producer offers",
        Search, "begins", _one_is_asked),
    _upstream("needs off by one", "the state counts as that of one epoch later",
        Needs, "at", _needs_off_by_one),
    _upstream("source too far", "a source's second replica leaves out rows that were only received",
        Producer, "stable", _follows_what_was_received),
    _changes("retention not awaited", "replicas are removed before their input is retained",
        ProtectionChange, "_lacks_retention", _retention_not_awaited,
        protocol="pairs", then="upstream"),
    _changes("late checkpoint", "a standby that has begun to compute still takes checkpoints",
        Transfers, "discard_state", _any_state_is_taken, protocol="passive", then="pairs"),
    Bug("end not committed", "sites are dismissed before the end is committed",
        Leading, "_commit", _end_not_committed),
    Bug("start not committed", "sites read sources before the start is committed",
        Leading, "_commit", _start_not_committed, faults=_LOST_AT_THE_START),
    Bug("fences outlive the term", "a leader fences sites that it gave up in an earlier term",
        ControlNode, "_decide", _fences_outlive_the_term, faults=_SILENT_WITHOUT_ARBITER),
    _apps("lease not watched", "a leader without an arbiter continues to lead",
        Leadership, "handle", _lease_not_watched, faults=_CUT_OFF),
    _pushed("pushed rows answered early", "a query is told that rows are taken which no other has",
        PushLog, "_waited_for", push_bugs.answered_early, faults=_SENT_TO_NOBODY),
    _pushed("push batches by number", "replicas have the same push batches if they have as many",
        PushLog, "_equal_up_to", push_bugs.equal_by_number, faults=_SENT_TO_ONE),
    _pushed("push batches on arrival", "pushed rows enter at a replica before all others have them",
        PushLog, "_enter_known", push_bugs.entered_on_arrival, faults=_SENT_TO_ONE),
    Bug("overtaken view", "a leader sends all views that waited for the arbiter, not only the last",
        PendingDecisions, "add", _overtaken_views_are_given_out),
    *MOVE_BUGS,
]  # fmt: skip
