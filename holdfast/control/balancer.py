"""The balancer of a flow: rounds of collecting statistics and of moving partitions.

It is part of the leading application. In a round it waits until every member has reported what it
did for some time, asks the policy (`holdfast.core.balance`) for moves, and has the controller begin
them. The next round begins when they are done. A failure, or anything else that leaves a task
unprotected, abandons the round: recovery comes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from holdfast.core import moves
from holdfast.core.balance import (
    BalanceHistory,
    BalanceParams,
    Collection,
    PartLoad,
    Round,
    SiteLoad,
    next_collect_ms,
    plan_round,
)
from holdfast.core.controller import Controller
from holdfast.core.flow_phase import FlowPhase
from holdfast.core.ids import GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import partitions_of
from holdfast.core.requests import MovesWanted, Relocation
from holdfast.errors import InvariantError

ROUNDS_KEPT = 20
"""How many of the last rounds are kept, for people."""

Status = Mapping[str, Any]
"""What a site reported last."""


class RoundPhase(Enum):
    RESTING = "resting"
    """Something is missing, or the flow does not run."""
    COLLECTING = "collecting"
    """Sites are measured."""
    MOVING = "moving"
    """Moves are under way."""


class RoundEvent(Enum):
    DISTURBED = "a replica is missing, or the flow does not run"
    SETTLED = "everything is in place"
    MOVES_BEGUN = "replicas leave their sites"
    MOVES_DONE = "no replica leaves its site any longer"


_P, _E = RoundPhase, RoundEvent
TABLE: dict[tuple[RoundPhase, RoundEvent], RoundPhase] = {
    (_P.RESTING, _E.DISTURBED): _P.RESTING,
    (_P.RESTING, _E.SETTLED): _P.COLLECTING,
    (_P.RESTING, _E.MOVES_BEGUN): _P.MOVING,
    (_P.COLLECTING, _E.DISTURBED): _P.RESTING,
    (_P.COLLECTING, _E.SETTLED): _P.COLLECTING,
    (_P.COLLECTING, _E.MOVES_BEGUN): _P.MOVING,
    (_P.MOVING, _E.DISTURBED): _P.RESTING,
    (_P.MOVING, _E.MOVES_BEGUN): _P.MOVING,
    (_P.MOVING, _E.MOVES_DONE): _P.COLLECTING,
}


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round that is over, for people."""

    at: float
    """Seconds since the first round began."""
    imbalance: float
    reasons: tuple[str, ...]
    moves: int
    left: tuple[SiteId, ...]
    """Sites that everything leaves."""


class LoadBalancer:
    """The machine. `step` is called often, and returns moves when a round is over."""

    def __init__(self, params: BalanceParams | None = None) -> None:
        self._params = params or BalanceParams()
        self.phase = RoundPhase.RESTING
        self.rounds: deque[RoundReport] = deque(maxlen=ROUNDS_KEPT)
        self._history = BalanceHistory()
        self._before: dict[SiteId, Status] = {}
        """By site: what it reported when the collection began."""
        self._begun_at = 0.0
        """When the collection or the moves began."""
        self._first_at: float | None = None
        self._collect_ms = self._params.collect_ms_min
        self._moves_took_ms = 0.0

    def _become(self, event: RoundEvent, now: float) -> None:
        """Enter the phase that `TABLE` has for an event."""
        phase = TABLE.get((self.phase, event))
        if phase is None:
            raise InvariantError(f"balancer: {event.value}, while {self.phase.value}")
        if phase is not self.phase:
            self.phase, self._begun_at, self._before = phase, now, {}

    def step(
        self, controller: Controller, sites: Mapping[int, Status], now: float
    ) -> MovesWanted | None:
        """The moves of a round that is over now; None if none is, or nothing is to be moved."""
        if self._first_at is None:
            self._first_at = now
        view = controller.view
        if view is None or controller.state is not FlowPhase.RUNNING or not controller.protected:
            self._become(RoundEvent.DISTURBED, now)
            return None
        if any(view.group(u).leaving for u in view.tasks()) or view.emptying:
            self._become(RoundEvent.MOVES_BEGUN, now)
            return None
        if self.phase is RoundPhase.MOVING:
            self._moves_took_ms = 1e3 * (now - self._begun_at)
            self._collect_ms = next_collect_ms(
                self._params, Collection(self._collect_ms, self._moves_took_ms)
            )
            self._become(RoundEvent.MOVES_DONE, now)
        self._become(RoundEvent.SETTLED, now)
        measured = self._measured(controller, sites)
        if measured is None:
            return None
        return self._decide(controller, *measured, now)

    def _measured(
        self, controller: Controller, sites: Mapping[int, Status]
    ) -> tuple[float, list[SiteLoad], list[PartLoad]] | None:
        """How long every site has been measured, in ms, and what was measured; None as long as one
        has not been measured for long enough."""
        assert controller.view is not None
        members = {s: sites.get(s) for s in controller.roster.domains}
        found: dict[SiteId, Status] = {s: m for s, m in members.items() if m is not None}
        for site, status in found.items():
            self._before.setdefault(site, status)
        if len(found) < len(members):
            return None
        spans = {s: 1e3 * (m["at_s"] - self._before[s]["at_s"]) for s, m in found.items()}
        if min(spans.values()) < self._collect_ms:
            return None
        loads = [_site_load(s, m, self._before[s]) for s, m in found.items()]
        parts = [p for s, m in found.items() for p in self._parts(controller, s, m)]
        return min(spans.values()), loads, parts

    def _parts(self, controller: Controller, site: SiteId, status: Status) -> list[PartLoad]:
        view = controller.view
        assert view is not None
        stages = {s.name: s for s in controller.shape.stages}
        before = {(m["stage"], m["group"]): m for m in self._before[site]["stages"]}
        parts = []
        for m in status["stages"]:
            stage, was = stages[m["stage"]], before.get((m["stage"], m["group"]))
            task: TaskId = (StageId(stage.id), GroupId(m["group"]))
            group = view.group(task)
            if site not in group.replicas + group.standbys or was is None:
                continue
            parts.append(
                PartLoad(
                    task,
                    site,
                    max(0, m["rows_in"] - was["rows_in"]),
                    max(0.0, m["work_s"] - was["work_s"]),
                    m["state_bytes"],
                    movable=stage.kind == "keyed",
                )
            )
        return parts

    def _decide(
        self,
        controller: Controller,
        collected_ms: float,
        sites: list[SiteLoad],
        parts: list[PartLoad],
        now: float,
    ) -> MovesWanted | None:
        view, shape, domains = controller.view, controller.shape, controller.roster.domains
        assert view is not None and self._first_at is not None

        def may_hold(task: TaskId, source: SiteId, target: SiteId) -> bool:
            return moves.refusal(view, shape, domains, Relocation(task, source, target)) is None

        found: Round = plan_round(
            sites,
            parts,
            Collection(collected_ms, self._moves_took_ms),
            self._params,
            may_hold,
            history=self._history,
            name=lambda task: f"partitions {partitions_of(view, [task], shape)}",
        )
        self._history, self._moves_took_ms = found.history, 0.0
        self.rounds.append(
            RoundReport(
                now - self._first_at,
                found.imbalance,
                found.reasons,
                len(found.moves),
                found.leaving,
            )
        )
        self._collect_ms, self._before = found.next_collect_ms, {}
        return MovesWanted(found.moves) if found.moves else None

    def metrics(self) -> dict[str, Any]:
        """What `Run.status` shows of it."""
        return {
            "phase": self.phase.value,
            "imbalance": self.rounds[-1].imbalance if self.rounds else None,
            "rounds": [
                {"at": r.at, "imbalance": r.imbalance, "moves": r.moves, "reasons": list(r.reasons)}
                for r in self.rounds
            ],
            "left": list(self.rounds[-1].left) if self.rounds else [],
        }


def _site_load(site: SiteId, status: Status, before: Status) -> SiteLoad:
    elapsed = status["at_s"] - before["at_s"]
    idle = status["idle_s"] - before["idle_s"]
    return SiteLoad(
        site,
        min(1.0, max(0.0, 1.0 - idle / elapsed)),
        state_bytes=sum(m["state_bytes"] for m in status["stages"]),
        cpu_s=max(0.0, status["cpu_s"] - before["cpu_s"]),
    )
