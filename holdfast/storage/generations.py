"""Ownership of a store: the *generations* of a flow. The last generation owns the folder.

A process that starts a flow in a folder, or resumes one from it, claims the next generation, and
exactly one process gets it. It claims the generation before it reads the folder. A generation
checks that it is still the last one after it has written a file and before anything depends on
that file. Files that an earlier generation adds late therefore have no effect, and they overwrite
nothing, because every file name carries the number of its generation.

On a local disk a claim is a name that only one process can create (a hard link). Object stores
could do the same with a conditional put, but pyarrow does not offer one. A listing of an object
store does show every earlier put. So claimants put *bids* under unique names and then list: a
claimant that sees no other bid has won, and every later claimant sees its bid. If two see each
other, neither has won; both withdraw and retry after a random time. This is always safe, and in
practice it terminates.
"""

from __future__ import annotations

import os
import random
import socket
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from holdfast.errors import FlowError, StoreTakenError
from holdfast.storage import layout
from holdfast.storage.files import Folder

BIDS_MAX = 20
"""Maximum bids of one claimant."""
RIVAL_S = 3.0
"""A bid that stays longer, in seconds, has won, or its process has died."""
LOOK_S = 0.1
"""Interval between two listings, in seconds."""

Pause = Callable[[float], None]


class Claim(msgspec.Struct, frozen=True):
    """The process that claimed a generation, for messages. Only the name of its file counts."""

    token: str
    flow: str
    host: str
    pid: int
    at: float

    @property
    def who(self) -> str:
        at = datetime.fromtimestamp(self.at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.host}, since {at}"


def last_generation(folder: Folder) -> int:
    """Return the generation that owns the folder; -1 if there is none."""
    return layout.latest(folder.list(layout.GENERATIONS))


def claim(folder: Folder, flow: str, after: int | None = None, pause: Pause = time.sleep) -> int:
    """Claim the generation that follows the last one, or follows `after`. Raise `StoreTakenError`
    if another process is faster."""
    generation = 1 + (last_generation(folder) if after is None else after)
    mine = Claim(uuid.uuid4().hex, flow, socket.gethostname(), os.getpid(), time.time())
    won = (
        _link(folder, generation, mine)
        if folder.is_local
        else _bid(folder, generation, mine, pause)
    )
    # Old claims are removed, so a process that was paused may get a number that is free again.
    if not won or last_generation(folder) > generation:
        raise taken(folder, generation)
    return generation


def _link(folder: Folder, generation: int, mine: Claim) -> bool:
    name = layout.generation_file(generation)
    if folder.create(name, mine):
        return True
    try:  # a network file system may repeat the call, and fail although the link exists
        return folder.get(name, Claim).token == mine.token
    except FlowError:
        return False


def _bid(folder: Folder, generation: int, mine: Claim, pause: Pause) -> bool:
    for attempt in range(BIDS_MAX):
        name = layout.generation_file(generation, f"{mine.token}-{attempt}")
        folder.put(name, mine)
        if not _rivals(folder, generation, name):
            return True
        folder.remove(name)
        waited = 0.0
        while _rivals(folder, generation, name):
            if waited > RIVAL_S:
                return False
            pause(LOOK_S)
            waited += LOOK_S
        pause(LOOK_S * random.random() * 2 ** min(attempt, 5))
    return False


def _rivals(folder: Folder, generation: int, mine: str) -> list[str]:
    names = folder.list(layout.GENERATIONS)
    return [n for n in names if n != mine and (layout.generation_of(n) or 0) >= generation]


def check(folder: Folder, generation: int) -> None:
    """Raise unless this generation still owns the folder."""
    last = last_generation(folder)
    if last > generation:
        raise taken(folder, last)
    if last < generation:
        raise FlowError(
            f"{folder.place} has changed: it no longer has the claim of this flow",
            hint="check whether the folder was removed or replaced while the flow ran",
        )


def holder(folder: Folder, generation: int) -> Claim | None:
    """Return the claim of a generation; None if there is none or it cannot be read."""
    for name in folder.list(layout.GENERATIONS):
        if layout.generation_of(name) == generation:
            try:
                return folder.get(name, Claim)
            except FlowError:
                return None
    return None


def taken(folder: Folder, generation: int) -> StoreTakenError:
    other = holder(folder, generation)
    who = f" ({other.who})" if other is not None else ""
    return StoreTakenError(
        f"another process owns the store {folder.place}{who}",
        hint="only one flow can use a store: stop the one that was started with checkpoint= or "
        "restore_from= there",
    )


def withdraw(folder: Folder, generation: int) -> None:
    """Remove the claim of a generation that has stored nothing."""
    for name in folder.list(layout.GENERATIONS):
        if layout.generation_of(name) == generation:
            folder.remove(name)
