"""Mistakes in moving replicas and emptying sites: see `holdfast.lab.sim.bugs`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.core import moves
from holdfast.core.controller import Controller
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.joins import ReplicaJoins
from holdfast.core.layout import PartitionGroup, Shape, View
from holdfast.core.roster import SiteRoster
from holdfast.lab.sim.planted import Bug


def _leaves_first(_: Any) -> Any:
    def is_replaced(view: View, shape: Shape, task: TaskId, joins: ReplicaJoins) -> bool:
        group = view.group(task)
        return bool(set(group.replicas) - set(group.leaving))

    return is_replaced


def _leaves_before_it_has_caught_up(_: Any) -> Any:
    def is_replaced(view: View, shape: Shape, task: TaskId, joins: ReplicaJoins) -> bool:
        group = view.group(task)
        return bool(group.joining) and len(group.staying) >= shape.stages[task[0]].guard.wanted

    return is_replaced


def _counts_those_that_leave(_: Any) -> Any:
    def lacks_replica(self: PartitionGroup, replicas: int) -> bool:
        return len(self.replicas) < replicas

    return lacks_replica


def _joins_all_the_same(_: Any) -> Any:
    def given_up(group: PartitionGroup) -> PartitionGroup:
        return replace(group, moving=())

    return given_up


def _never_given_up(_: Any) -> Any:
    def given_up(group: PartitionGroup) -> PartitionGroup:
        return group

    return given_up


def _goes_without_replacement(_: Any) -> Any:
    def is_superfluous(view: View, shape: Shape, site: SiteId, joins: ReplicaJoins) -> bool:
        return True

    return is_superfluous


def _filled_again(right: Any) -> Any:
    def candidates(self: SiteRoster, closed: Any = ()) -> Any:
        return right(self)

    return candidates


def _to_where_one_is(_: Any) -> Any:
    def refusal(view: View, shape: Shape, domains: Any, move: Any) -> str | None:
        group = view.group(move.task)
        stays = move.source in group.replicas and not group.joining and not group.leaving
        return None if stays and shape.stages[move.task[0]].kind == "keyed" else "not now"

    return refusal


def _not_continued(right: Any) -> Any:
    def resume(self: Controller, view: View, *args: Any, **more: Any) -> Any:
        return right(self, replace(view, emptying=()), *args, **more)

    return resume


_move = partial(Bug, moves=8)

MOVE_BUGS: list[Bug] = [
    _move("leaver goes first", "a replica leaves before the one that replaces it has its state",
        moves, "is_replaced", _leaves_first),
    _move("leaver does not wait", "a replica leaves when another one begins to join",
        moves, "is_replaced", _leaves_before_it_has_caught_up, protocol="passive"),
    _move("leaver counted", "a replica that joins for one that leaves becomes a standby",
        PartitionGroup, "lacks_replica", _counts_those_that_leave),
    _move("joiner of a move kept", "the replica that joins for a move joins on after a failure",
        moves, "given_up", _joins_all_the_same),
    _move("move not given up", "a failure does not give up moves",
        moves, "given_up", _never_given_up, protocol="passive"),
    _move("drained without replacement", "a site leaves before others have what it holds",
        moves, "is_superfluous", _goes_without_replacement),
    _move("drained site filled", "replicas join at a site that is being emptied",
        SiteRoster, "candidates", _filled_again),
    _move("two replicas at a site", "a replica moves to a site that has one",
        moves, "refusal", _to_where_one_is),
    _move("drain forgotten", "the next leader does not continue to empty sites",
        Controller, "resume", _not_continued, kinds=("controller", "crash")),
]  # fmt: skip
