"""Why events are discarded."""

from __future__ import annotations

from enum import Enum


class Stale(Enum):
    """Why a site's dataflow discards an event."""

    VIEW = "the site acts on another view, or on a later one"
    NOT_HELD = "the task is not held here"
    OTHER_INCARNATION = "it is for, or from, a replica that was there before"
    REPEATED = "it came before"
    NO_STATE = "the replica has no state that it could hand over"
    NOT_COMPUTING = "the replica does not compute"
    NOT_JOINING = "the joiner was given up meanwhile"
    HANDED_OVER = "the state has gone to that joiner"
    NOT_AWAITED = "the replica waits for no hand-over"
    NOT_SEARCHING = "the replica is not being rebuilt"
    NOT_FOLLOWING = "the replica knows by itself what is durable"
