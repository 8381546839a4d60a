"""Mistakes in how a push source's replicas agree on what was taken: see `holdfast.lab.sim.bugs`."""

from __future__ import annotations

from typing import Any

from holdfast.site.push_entries import Holding
from holdfast.site.push_log import PushLog


def answered_early(_: Any) -> Any:
    def waited_for(self: PushLog) -> int:
        return self.submitted

    return waited_for


def equal_by_number(_: Any) -> Any:
    def equal_up_to(self: PushLog, holding: Holding) -> int:
        return holding.made[-1][1] if holding.made else holding.entered

    return equal_up_to


def entered_on_arrival(_: Any) -> Any:
    def enter_known(self: PushLog) -> Any:
        return self._enter_up_to(self.matched)

    return enter_known
