"""Checkpoints of a running flow: which epoch is stored next, and whether it is stored completely.

A checkpoint is the state of all tasks after the same epoch. A task processes one epoch at a time,
so nothing has to be aligned: the leading replica of each task learns the epoch before it reaches
it, and stores its state after it. If the order comes too late for a task, or its leader is lost
before it has stored, the checkpoint fails, and the next one is of a later epoch. Only a complete
checkpoint gets a manifest; until then the one before it counts.
"""

from __future__ import annotations

from typing import Any, assert_never

from holdfast.core.effects import OrderStore, StoreEffect, WriteManifest
from holdfast.core.events import (
    ManifestWritten,
    PeerLost,
    RecordArrived,
    StoreDue,
    StoreEvent,
    StoreFailed,
    TaskStored,
    ViewCommitted,
)
from holdfast.core.ids import NO_EPOCH, Epoch, SiteId, TaskId

LAYERS_MAX = 8
"""The most layers of a checkpoint: a whole one and increments to it. Then the next one is whole."""
MISSES_MAX = 6
"""How often the distance to the next epoch is doubled, at most, after orders that came too late."""


class Checkpoints:
    """The machine. The flow begins after the epoch `begun`."""

    def __init__(self, begun: Epoch = NO_EPOCH) -> None:
        self.recorded = begun
        """The last epoch that was cut."""
        self.epoch: Epoch | None = None
        """The epoch of the checkpoint that is being stored."""
        self.complete: Epoch | None = None
        """The epoch of the last complete checkpoint."""
        self.failure = ""
        """Why the last checkpoint failed; empty if it did not."""
        self._missing: dict[TaskId, SiteId] = {}
        """By task that is not stored: the site that leads it."""
        self._stored: dict[TaskId, Any] = {}
        self._misses = 0
        self._layers = 0

    def handle(self, event: StoreEvent) -> list[StoreEffect]:
        match event:
            case RecordArrived():
                self.recorded = max(self.recorded, event.record.epoch)
            case StoreDue():
                return self._on_store_due(event)
            case TaskStored():
                return self._on_task_stored(event)
            case StoreFailed():
                self._on_store_failed(event)
            case ViewCommitted():
                self._on_view_committed(event)
            case PeerLost():
                if event.site in self._missing.values():
                    self._give_up(f"the connection to site {event.site} broke")
            case ManifestWritten():
                self._on_manifest_written(event)
            case _:
                assert_never(event)
        return []

    def _on_store_due(self, event: StoreDue) -> list[StoreEffect]:
        view = event.view
        if self.epoch is not None or view.bare():
            return []
        self._missing = {task: view.group(task).replicas[0] for task in view.tasks()}
        self._stored = {}
        self.epoch = Epoch(self.recorded + max(1, event.ahead) * 2 ** min(self._misses, MISSES_MAX))
        after = self.complete if self._layers < LAYERS_MAX else None
        return [OrderStore(self.epoch, after)]

    def _on_task_stored(self, event: TaskStored) -> list[StoreEffect]:
        if event.epoch != self.epoch or event.task not in self._missing:
            return []  # of a checkpoint that was given up
        del self._missing[event.task]
        self._stored[event.task] = event.what
        return [] if self._missing else [WriteManifest(event.epoch, self._stored)]

    def _on_store_failed(self, event: StoreFailed) -> None:
        if event.epoch == self.epoch and self._missing:
            self._misses += event.missed
            self._give_up(event.reason)

    def _on_view_committed(self, event: ViewCommitted) -> None:
        """Give up if another site leads a task now that is not stored."""
        view = event.view
        gone = [u for u, site in self._missing.items() if not view.group(u).led_by(site)]
        if gone:
            self._give_up(f"site {self._missing[gone[0]]} no longer leads {gone[0]}")

    def _on_manifest_written(self, event: ManifestWritten) -> None:
        if event.epoch != self.epoch:
            return
        if event.error:
            self._give_up(event.error)
            return
        self._layers = 1 if self._layers >= LAYERS_MAX else self._layers + 1
        self.complete, self.epoch, self.failure, self._misses = event.epoch, None, "", 0

    def _give_up(self, reason: str) -> None:
        self.failure, self.epoch, self._missing = reason, None, {}
