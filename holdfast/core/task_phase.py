"""How protected a task is, in words: see the glossary."""

from __future__ import annotations

from holdfast.core.ids import TaskId
from holdfast.core.joins import ReplicaJoins
from holdfast.core.layout import Shape, View
from holdfast.core.placement import is_complete
from holdfast.core.protection_change import ProtectionChange

SAFE = ("protected", "moving", "not protected")
"""The phases of tasks that have all the protection that is wanted."""


def task_phase(task: TaskId, view: View, shape: Shape, joins: ReplicaJoins) -> str:
    """The phase of a task in a view."""
    group, guard = view.group(task), shape.stages[task[0]].guard
    if ProtectionChange(view, shape).changes(task):
        return "changing"
    if guard.wanted == 1 and not guard.level:
        return "not protected"
    if not group.replicas:
        return "rebuilt"
    if group.leaving and is_complete(view, shape, task):
        return "moving"
    if group.joining:
        return "copying" if joins.is_copying(task) else "taken over"
    if not is_complete(view, shape, task):
        return "taken over"
    return "replaying" if joins.is_replaying(task) else "protected"
