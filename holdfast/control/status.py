"""The status of a flow, as `Run.status`, the metrics and the live table show it."""

from __future__ import annotations

from typing import Any

from holdfast.api.options import Options
from holdfast.control.balancer import LoadBalancer
from holdfast.core.controller import Controller

UNKNOWN: dict[str, Any] = {
    "view": None,
    "term": -1,
    "protected": False,
    "partitions": [],
    "exposed": [],
    "emptying": [],
    "balance": None,
    "dead": {},
}
"""The status of a flow as long as no application is known to lead."""


def described(
    controller: Controller,
    sites: list[dict[str, Any]],
    options: Options,
    balancer: LoadBalancer | None,
) -> dict[str, Any]:
    """What only the leading application knows. `sites` is what sites reported last."""
    view = controller.view
    return {
        "view": str(view) if view else None,
        "term": view.term if view else -1,
        "protected": controller.protected,
        "partitions": _groups(controller, sites, options),
        "exposed": [str(exposure) for exposure in controller.exposures],
        "emptying": list(view.emptying) if view else [],
        "balance": balancer.metrics() if balancer is not None else None,
        "dead": {int(s): reason for s, reason in controller.dead.items()},
    }


def _groups(
    controller: Controller, sites: list[dict[str, Any]], options: Options
) -> list[dict[str, Any]]:
    """By partition group: the sites that hold it, how protected it is, and what is missing."""
    view = controller.view
    if view is None:
        return []
    copying = {(*c["task"], c["to"]): c for s in sites for c in s["copying"]}
    finished = {
        (stage, group, s["site"]): epoch
        for s in sites
        for stage, group, epoch, installed in s["finished_epochs"]
        if installed
    }
    rows = []
    for task in view.tasks():
        group = view.group(task)
        reached = [finished.get((*task, s), -1) for s in group.replicas]
        replicas = [copying[(*task, s)] for s in group.joining if (*task, s) in copying]
        left = sum(c["bytes_left"] for c in replicas)
        rows.append(
            {
                "stage": controller.shape.stages[task[0]].name,
                "partitions": [group.first, group.end - 1],
                "replicas": list(group.replicas),
                "joining": list(group.joining),
                "standbys": list(group.standbys),
                "leaving": list(group.leaving),
                "phase": controller.phase(task),
                "bytes_to_go": left,
                "epochs_to_go": max(reached, default=-1) - min(reached, default=-1),
                "seconds_to_go": left / (options.catch_up_mb_s * 1e6),
                "reason": controller.joins.unrecovered.get(task),
            }
        )
    return rows


def late_rows(sites: list[dict[str, Any]]) -> dict[str, int]:
    """By stage: how many rows were late, if any. All replicas of a partition count the same rows,
    and one that has just joined may not have reported them yet."""
    found: dict[tuple[str, int], int] = {}
    for task in (task for site in sites for task in site["stages"]):
        key = (task["stage"], task["first"])
        found[key] = max(found.get(key, 0), task["late_rows"])
    totals: dict[str, int] = {}
    for (stage, _), rows in found.items():
        if rows:
            totals[stage] = totals.get(stage, 0) + rows
    return totals
