"""A site of the model: the real `Dataflow`, and what a site's node does around it.

Operators are the functions of `holdfast.lab.model.flow`. What `SiteNode` does with an effect is
done here with messages of the model: acks to one site go in one message, a hand-over begins and
ends with a message of its own, and a failed hand-over is remembered until a view removes the
replica. There is no sequencer: every site knows the records.
"""

from __future__ import annotations

from typing import Any

from holdfast.core import effects as fx
from holdfast.core.dataflow import Dataflow
from holdfast.core.events import (
    AckArrived,
    BundleArrived,
    CatchUpOrdered,
    HandOverBegun,
    PeerConnected,
    PeerLost,
    RecordArrived,
    ReplicaInstalled,
    SiteEvent,
    TaskProcessed,
    ViewCommitted,
)
from holdfast.core.ids import Epoch, GroupId, SiteId, TaskId
from holdfast.core.layout import Shape, View
from holdfast.core.messages import Ack
from holdfast.lab.model import flow
from holdfast.lab.model import messages as ms
from holdfast.lab.model.outputs import Join, Members, Output, Send, Tell, Vanish, Write
from holdfast.lab.sim.checks import Violation

Order = fx.IngestEpochs | fx.ProcessBundles


class ModelSite:
    """One life of a site. `step` takes what happens to it and returns what it does to others."""

    def __init__(self, site: SiteId, shape: Shape, window: int) -> None:
        self.site = site
        self.dataflow = Dataflow(site, shape, window)
        self.states: dict[TaskId, int] = {}
        """By task that has state: the operator's state."""
        self.results: dict[TaskId, tuple[int, ...]] = {}
        """By task that is written to the store: the result of every epoch so far."""
        self.orders: dict[TaskId, Order] = {}
        self.incoming: dict[TaskId, SiteId] = {}
        """By task whose state is coming in: the site that it comes from."""
        self.outgoing: dict[tuple[TaskId, SiteId], ms.StateSent] = {}
        """Hand-overs that have begun and not ended."""
        self.failed: dict[tuple[TaskId, SiteId], int] = {}
        """By hand-over that failed: the view in which that replica joined."""
        self.unseen = False
        """Whether the site must report its view, when it is connected to all members."""
        self._acks: dict[SiteId, dict[tuple[int, int, int], Ack]] = {}
        self._out: list[Output] = []

    # --- what happens ---------------------------------------------------------------------------

    def step(self, kind: str, *what: Any) -> tuple[Output, ...]:
        """Handle one thing that happens, and all that follows from it at this site."""
        self._out = []
        getattr(self, f"_on_{kind}")(*what)
        while self._acks:
            self._flush()
        self._report_seen()
        found, self._out = tuple(self._out), []
        for replica in self.dataflow.tasks.values():
            replica.history.clear()  # it is for messages, and would be copied with every step
        self.dataflow.check_invariants()
        self._check_states()
        return found

    def _on_message(self, sender: SiteId, message: Any) -> None:
        match message:
            case ms.LinkUp():
                self._handle(PeerConnected(sender))
            case ms.LinkDown():
                self._handle(PeerLost(sender))
            case ms.BundleSent():
                self._handle(BundleArrived(message.key, message.frame))
            case ms.AcksSent():
                for ack in message.acks:
                    self._handle(AckArrived(sender, ack))
            case ms.StateOffer():
                self._handle(HandOverBegun(message.task, sender, message, message.joined_view))
            case ms.StateSent():
                self._on_hand_over_end(sender, message)
            case ms.ViewSent():
                self._on_new_view(message.view)
            case ms.CatchUpSent():
                self._on_catch_up(message)
            case ms.FenceSent():
                self._out.append(Vanish())
            case _:
                raise TypeError(message)

    def _on_new_view(self, view: View) -> None:
        if view.replaces(self.dataflow.view):
            for other in sorted(self.dataflow.exchanges.connected):
                if other not in view.members:
                    self._handle(PeerLost(other))
            self.failed = {
                (task, joiner): number
                for (task, joiner), number in self.failed.items()
                if joiner in view.group(task).joining
                and view.group(task).joined_view_of(joiner) == number
            }
            self._handle(ViewCommitted(view))
            self._out.append(Members(view.members))
            self._lead()
        self.unseen = True

    def _report_seen(self) -> None:
        view = self.dataflow.view
        connected = self.dataflow.exchanges.connected
        if view is not None and self.unseen and connected.issuperset(view.members):
            self.unseen = False
            self._out.append(Tell(ms.ViewActedOn(view.term, view.number)))

    def _on_records(self, first: int, end: int, epochs: int) -> None:
        for epoch in range(first, end):
            self._handle(RecordArrived(flow.record(epoch, epochs)))

    def _on_catch_up(self, message: ms.CatchUpSent) -> None:
        if (message.task, message.joiner) in self.failed:
            self._tell(message.task, message.joiner, "failed")
        else:
            self._handle(CatchUpOrdered(message.task, message.joiner))

    def _on_hand_over_end(self, sender: SiteId, message: ms.StateSent) -> None:
        task = message.task
        if self.incoming.get(task) != sender:
            return
        del self.incoming[task]
        self.states[task], self.results[task] = message.state, message.results
        kept = {x: {c: list(found) for c, found in lanes} for x, lanes in message.kept}
        gaps = {x: dict(lanes) for x, lanes in message.gaps}
        self._handle(ReplicaInstalled(task, message.epoch, kept, gaps))

    def _on_rest(self, task: TaskId, joiner: SiteId) -> None:
        """Send the rest of a hand-over."""
        self._send(joiner, self.outgoing.pop((task, joiner)))

    def _on_work(self, task: TaskId) -> None:
        order = self.orders.pop(task)
        if isinstance(order, fx.IngestEpochs):
            outputs = [self._ingest(task, record.epoch) for record in order.records]
            last = order.records[-1].epoch
        else:
            outputs = [{} for _ in order.epochs]
            for epoch, bundles in enumerate(order.epochs, order.first):
                self._process(task, Epoch(epoch), bundles[flow.EXCHANGE])
            last = order.epoch
        *earlier, output = outputs
        self._handle(TaskProcessed(task, last, True, output, earlier=tuple(earlier)))

    def _ingest(self, task: TaskId, epoch: Epoch) -> Any:
        consumers = self._view.groups[flow.LAST]
        row = {c: flow.row(task[1], epoch, c) for c in map(GroupId, range(len(consumers)))}
        return {flow.EXCHANGE: row}

    def _process(self, task: TaskId, epoch: Epoch, frames: list[flow.Frame]) -> None:
        state = self.states[task] = flow.fold(self.states[task], frames)
        self.results[task] = (*self.results[task], state)
        if self._view.group(task).led_by(self.site):
            self._out.append(Write(task, epoch, state))

    def _lead(self) -> None:
        """Have the store take the results that it lacks of tasks which are led here."""
        for task, replica in self.dataflow.tasks.items():
            leads = self._view.group(task).led_by(self.site)
            if task[0] == flow.LAST and replica.has_state and leads:
                self._out.append(Join(task, self.results[task]))

    # --- effects --------------------------------------------------------------------------------

    @property
    def _view(self) -> View:
        assert self.dataflow.view is not None
        return self.dataflow.view

    def _handle(self, event: SiteEvent) -> None:
        for effect in self.dataflow.handle(event):
            self._apply(effect)

    def _apply(self, effect: fx.SiteEffect) -> None:
        match effect:
            case fx.OpenTask():
                self._open(effect.task, self.site in effect.view.group(effect.task).replicas)
            case fx.CloseTask():
                self._close(effect.task)
            case fx.IngestEpochs() | fx.ProcessBundles():
                self.orders[effect.task] = effect
            case fx.SendBundle() if effect.site == self.site:
                self._handle(BundleArrived(effect.key, effect.bundle))
            case fx.SendBundle():
                self._send(effect.site, ms.BundleSent(effect.key, effect.bundle))
            case fx.SendAck():
                ack = effect.ack
                ends = (ack.exchange, ack.producer, ack.consumer)
                self._acks.setdefault(effect.site, {})[ends] = ack
            case fx.HandOver():
                self._hand_over(effect)
            case fx.AbandonHandOver():
                self.outgoing.pop((effect.task, effect.joiner), None)
            case fx.ReceiveState():
                self.failed.pop((effect.task, self.site), None)
                self._open(effect.task, False)
                self.incoming[effect.task] = effect.sender
            case fx.DiscardState():
                self.incoming.pop(effect.task, None)
            case fx.ReportJoinFailed():
                self._fail(effect.task, effect.joiner)
            case fx.ReportReplica():
                self._report(effect)
            case fx.ReportFinished():
                self._out.append(Tell(ms.SiteDone(self._view.number)))
            case fx.AskRecords() | fx.ReportDelivered():
                pass  # every site knows the records
            case _:
                raise TypeError(effect)

    def _open(self, task: TaskId, begins: bool) -> None:
        self.states.pop(task, None)
        self.results.pop(task, None)
        if begins:
            self.states[task], self.results[task] = 0, ()

    def _close(self, task: TaskId) -> None:
        self._open(task, False)
        self.incoming.pop(task, None)
        self.orders.pop(task, None)

    def _hand_over(self, effect: fx.HandOver) -> None:
        task = effect.task
        kept = tuple(
            (x, tuple((c, tuple(found)) for c, found in lanes.items()))
            for x, lanes in effect.kept.items()
        )
        gaps = tuple(
            (x, tuple((c, gap) for c, gap in lanes.items())) for x, lanes in effect.gaps.items()
        )
        rest = ms.StateSent(task, effect.epoch, self.states[task], self.results[task], kept, gaps)
        self.outgoing[task, effect.joiner] = rest
        self._send(effect.joiner, ms.StateOffer(task, effect.epoch, effect.joined_view))

    def _report(self, effect: fx.ReportReplica) -> None:
        if effect.phase == "failed":
            self._fail(effect.task, self.site)
        elif effect.phase == "installed":
            self.failed.pop((effect.task, self.site), None)
            self._tell(effect.task, self.site, effect.phase)
        # Under pairs no decision depends on whether a replica has caught up.

    def _fail(self, task: TaskId, joiner: SiteId) -> None:
        group = self._view.group(task)
        if joiner in group.joining:
            self.failed[task, joiner] = group.joined_view_of(joiner)
        self._tell(task, joiner, "failed")

    def _tell(self, task: TaskId, site: SiteId, phase: str) -> None:
        self._out.append(Tell(ms.ReplicaSaid(site, task, self._view.number, phase)))

    def _send(self, site: SiteId, message: Any) -> None:
        self._out.append(Send(site, message))

    def _flush(self) -> None:
        waiting, self._acks = self._acks, {}
        for site, acks in waiting.items():
            if site != self.site:
                self._send(site, ms.AcksSent(tuple(acks.values())))
                continue
            for ack in acks.values():
                self._handle(AckArrived(site, ack))

    # --- checks ---------------------------------------------------------------------------------

    def _check_states(self) -> None:
        """Every replica that has state has the right one: that of the undisturbed flow."""
        for task, replica in self.dataflow.tasks.items():
            if not replica.has_state:
                continue
            producers = len(self._view.groups[flow.SOURCE])
            right = flow.reference(task, replica.finished, producers)
            found = self.states.get(task)
            if found != right:
                raise Violation(
                    f"site {self.site}: the state of task {task} after epoch {replica.finished} "
                    f"is {found}, not {right}"
                )
