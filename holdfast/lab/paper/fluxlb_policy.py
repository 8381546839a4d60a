"""The policies of ``holdfast paper fluxlb``: the rules of the thesis, and those of Holdfast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from holdfast.core.balance import (
    BalanceHistory,
    BalanceParams,
    BalancePolicy,
    Collection,
    PartLoad,
    Relocation,
    SiteLoad,
    next_collect_ms,
    plan_round,
)
from holdfast.core.ids import GroupId, SiteId, StageId, TaskId
from holdfast.lab.paper.fluxlb_sim import RATE, SITES, Array, Order, RoundSample

STAGE = StageId(1)
_TASKS: list[TaskId] = [(STAGE, GroupId(n)) for n in range(256 * SITES)]
_SITE_IDS = [SiteId(n) for n in range(SITES)]


@dataclass
class HoldfastBalancer:
    """Holdfast's policy, fed with what the simulated machines measured."""

    params: BalanceParams = field(default_factory=BalanceParams)
    history: BalanceHistory = field(default_factory=BalanceHistory)
    overlaps: bool = True
    rounds: int = 0

    def first_collect_s(self) -> float:
        return self.params.collect_ms_min / 1e3

    def after_moves_s(self, took_s: float) -> float:
        last = Collection(0.0, moves_took_ms=1e3 * took_s)
        return next_collect_ms(self.params, last) / 1e3

    def plan(self, sample: RoundSample, under_way: Sequence[Order]) -> tuple[list[Order], float]:
        self.rounds += 1
        size = int(sample.state_bytes)
        held = np.bincount(sample.owner, minlength=SITES)
        spilled = np.bincount(sample.owner, sample.on_disk, SITES)
        sites = [
            SiteLoad(
                SiteId(n),
                float(sample.busy[n]),
                int(sample.memory[n]),
                int(held[n]) * size,
                int(spilled[n]) * size,
            )
            for n in range(SITES)
        ]
        columns = zip(
            sample.owner.tolist(), sample.rows.tolist(), sample.on_disk.tolist(), strict=True
        )
        parts = [
            PartLoad(task, _SITE_IDS[s], int(r), r / RATE, size, True, size if d else 0)
            for task, (s, r, d) in zip(_TASKS, columns, strict=False)
        ]
        in_flight = [
            Relocation((STAGE, GroupId(q)), SiteId(int(sample.owner[q])), SiteId(target))
            for q, target in under_way
        ]
        collection = Collection(
            1e3 * sample.seconds, 1e3 * sample.moves_took_s, 1e3 * sample.gathering_took_s
        )
        found = plan_round(
            sites, parts, collection, self.params, _anywhere, in_flight, self.history
        )
        self.history = found.history
        orders = [(int(m.task[1]), int(m.target)) for m in found.moves]
        return orders, next_collect_ms(self.params, collection) / 1e3


def _anywhere(task: TaskId, source: SiteId, target: SiteId) -> bool:
    return True


@dataclass
class ThesisBalancer:
    """The rules of sections 4.4.3, 4.5.2 and 4.5.4: pairs of machines, working inwards, by the
    statistics of one round, one partition per pair."""

    policy: BalancePolicy = BalancePolicy.CPU
    collect_s_min: float = 0.010
    imbalance_min: float = 1.2
    receiver_max: float = 0.9
    as_printed: bool = False
    """Whether a receiver's utilisation grows by the donor's rows, as the thesis prints the formula,
    and not by the receiver's, as it derives it."""
    overlaps: bool = False

    def first_collect_s(self) -> float:
        return self.collect_s_min

    def after_moves_s(self, took_s: float) -> float:
        return max(self.collect_s_min, took_s)

    def plan(self, sample: RoundSample, under_way: Sequence[Order]) -> tuple[list[Order], float]:
        by_memory = self.policy is BalancePolicy.MEMORY or (
            self.policy is BalancePolicy.HYBRID and bool(sample.on_disk.any())
        )
        orders = self._by_memory(sample) if by_memory else self._by_cpu(sample)
        return orders, max(self.collect_s_min, sample.seconds / 2, sample.gathering_took_s)

    def _by_cpu(self, sample: RoundSample) -> list[Order]:
        busy, mean = sample.busy, float(sample.busy.mean())
        total = np.bincount(sample.owner, sample.rows, SITES)
        held = np.bincount(sample.owner, minlength=SITES) * sample.state_bytes
        by_use = np.argsort(-busy, kind="stable")
        orders: list[Order] = []
        for donor, receiver in zip(by_use[: SITES // 2], by_use[::-1], strict=False):
            high, low = float(busy[donor]), float(busy[receiver])
            if high < mean or low > self.receiver_max or high < self.imbalance_min * low:
                break
            room = sample.memory[receiver] - held[receiver] >= sample.state_bytes
            if total[donor] <= 0 or (self.policy is BalancePolicy.HYBRID and not room):
                continue
            there = np.flatnonzero(sample.owner == donor)
            rows = sample.rows[there]
            less = high * (1.0 - rows / total[donor])
            of = donor if self.as_printed else receiver
            more = low + rows * (low / total[of] if total[of] else high / total[donor])
            good = (np.abs(less - more) < high - low) & (more <= 1.0) & (rows > 0)
            orders += _largest(there[good], rows[good], int(receiver))
        return orders

    def _by_memory(self, sample: RoundSample) -> list[Order]:
        size = sample.state_bytes
        excess = sample.memory - np.bincount(sample.owner, minlength=SITES) * size
        by_excess = np.argsort(excess, kind="stable")
        orders: list[Order] = []
        for donor, receiver in zip(by_excess[: SITES // 2], by_excess[::-1], strict=False):
            if excess[receiver] - excess[donor] <= size:
                break
            there = np.flatnonzero(sample.owner == donor)
            orders += _largest(there, -sample.on_disk[there].astype(float), int(receiver))
        return orders


def _largest(partitions: Array, weights: Array, target: int) -> list[Order]:
    if not len(partitions):
        return []
    return [(int(partitions[np.argmax(weights)]), target)]
