"""How a site completes the last epoch: its sinks become durable, readers get what is kept, the
tasks are stored if the flow shall be resumed; then the site reports that it has finished.

The steps belong to a view. A new view begins with the first of them again, because a task may have
moved to this site.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import StoreState
from holdfast.core.ids import SiteId, TaskId
from holdfast.errors import require
from holdfast.net import wire
from holdfast.site.checkpoints import Stores
from holdfast.site.egress import Egress
from holdfast.site.serving import Serving
from holdfast.site.stages import SiteStages

READERS_S = 10.0
"""How long a flow that is stopped and stored waits for readers that are connected."""


class EndingStep(Enum):
    RUNNING = "epochs are being processed"
    DRAINING = "sinks are not durable yet, or readers lack rows"
    STORING = "sinks are closed, and tasks are being stored"
    FINISHED = "the site has reported that it has finished"


STEPS = {
    EndingStep.RUNNING: {EndingStep.RUNNING, EndingStep.DRAINING, EndingStep.STORING},
    EndingStep.DRAINING: {EndingStep.RUNNING, EndingStep.DRAINING, EndingStep.STORING},
    EndingStep.STORING: {EndingStep.RUNNING, EndingStep.DRAINING, EndingStep.FINISHED},
    EndingStep.FINISHED: {EndingStep.RUNNING},
}
"""Which steps may follow each. A new view leads back to RUNNING."""


class Ending:
    """`tell` reaches the controller."""

    def __init__(
        self,
        site: SiteId,
        stages: SiteStages,
        dataflow: Dataflow,
        serving: Serving,
        stores: Stores,
        now: Callable[[], float],
        tell: Callable[[wire.Message], None],
    ) -> None:
        self._site, self._stages, self._dataflow = site, stages, dataflow
        self._serving, self._stores, self._now, self._tell = serving, stores, now, tell
        self.step = EndingStep.RUNNING
        self._draining_since = 0.0
        self._final: dict[TaskId, wire.TaskFiles] = {}
        """The tasks that are stored as the flow is stopped with them."""
        self._finalizing: set[TaskId] = set()
        """Those that are being stored so."""

    def _become(self, step: EndingStep) -> None:
        require(step in STEPS[self.step], f"{self.step.name} cannot become {step.name}")
        self.step = step

    @property
    def finished(self) -> bool:
        return self.step is EndingStep.FINISHED

    @property
    def stores_final(self) -> bool:
        """Whether the flow is being stopped: no other checkpoint counts any more."""
        return bool(self._finalizing or self._final)

    def on_view(self) -> None:
        self._become(EndingStep.RUNNING)

    def on_closed(self, task: TaskId) -> None:
        """The site no longer holds the task."""
        self._finalizing.discard(task)

    def repeat(self) -> None:
        """Report again what a new controller must know."""
        assert self._dataflow.view is not None
        for message in self._final.values():
            self._tell(message)
        if self.finished:
            self._tell(wire.Finished(self._dataflow.view.number))

    def advance(self) -> None:
        """Look again whether readers and sinks are done, if that is what the site waits for."""
        if self.step is EndingStep.DRAINING:
            self.finish()

    def finish(self) -> None:
        """Every task here has processed the last epoch: take the next step that is possible."""
        stores = self._stores.can_store and not self._dataflow.records.ended
        if self.step is not EndingStep.DRAINING:
            self._draining_since = self._now()
        if not self._is_drained(stores):
            self._become(EndingStep.DRAINING)
            return
        if self.step is not EndingStep.STORING:
            self._become(EndingStep.STORING)
            self._stages.close_sinks()  # before their positions are stored
        if stores and self._begin_storing():
            return
        assert self._dataflow.view is not None
        self._become(EndingStep.FINISHED)
        self._stages.close_sources()
        self._tell(wire.Finished(self._dataflow.view.number))

    def _is_drained(self, stores: bool) -> bool:
        """Whether all sinks are durable and no reader lacks rows. If the flow is stored, readers
        can read later, so it waits only for those that are connected, and not for long."""
        egresses = [r.egress for r in self._stages.tasks.values() if r.egress is not None]
        patient = not stores or self._now() - self._draining_since < READERS_S

        def is_read(egress: Egress) -> bool:
            # A reader that does not learn that it has everything would ask again, and find no site.
            return egress.is_replayed and (
                egress.is_drained or not patient or (stores and not egress.is_attended)
            )

        done = [is_read(egress) and egress.finish() for egress in egresses]
        return all(done) and not self._serving.owes_answers

    def _begin_storing(self) -> bool:
        """Store the tasks that are led here, unless they are; return whether any is not yet."""
        view, last = self._dataflow.view, self._dataflow.records.last
        assert view is not None and last is not None
        led = [task for task in self._stages.tasks if view.group(task).led_by(self._site)]
        missing = [task for task in led if task not in self._final]
        for task in (t for t in missing if t not in self._finalizing):
            self._finalizing.add(task)
            order = StoreState(task, last, None)
            self._stores.begin(order, self._stages.tasks[task], self._on_stored)
        return bool(missing)

    def _on_stored(self, message: wire.TaskFiles) -> None:
        self._finalizing.discard(message.task)
        self._final[message.task] = message
        self._tell(message)
        if self.step is EndingStep.STORING:
            self.finish()
