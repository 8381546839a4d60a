"""Who may write to a store: the *generations* of a flow, of which the last one has the folder.

Whoever starts a flow in a folder, or resumes one from it, claims the next generation, and exactly
one process gets it. It is claimed before the claimant looks at what is there; a generation that is
not the last any more finds that out after it has written something and before anybody acts on it.
So what an earlier generation adds late counts for nothing, and as every file bears the number of
its generation it overwrites nothing either.

On a local disk a claim is a name that only one process can make (a hard link). Object stores could
do the same by a conditional put, but pyarrow has none. What they have is that a listing shows all
that was put before it. So claimants put *bids* under names of their own and then list: one that
sees no other bid has won, and any later one sees its bid. Of two that see each other neither has
won; both withdraw, and try again after a random time. That is safe always, and live in practice.
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
RIVAL_S = 3.0
"""A bid that stays for so long has won, or whoever made it is lost."""
LOOK_S = 0.1

Pause = Callable[[float], None]


class Claim(msgspec.Struct, frozen=True):
    """For whoever wants to know who it was; only the name of its file counts."""

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
    """The one that has the folder; -1 if nobody has had it."""
    return layout.latest(folder.list(layout.GENERATIONS))


def claim(folder: Folder, flow: str, after: int | None = None, pause: Pause = time.sleep) -> int:
    """Claim the generation after the last one, or after the one that was seen to be the last. If
    another process is faster this one is refused."""
    generation = 1 + (last_generation(folder) if after is None else after)
    mine = Claim(uuid.uuid4().hex, flow, socket.gethostname(), os.getpid(), time.time())
    won = (
        _link(folder, generation, mine)
        if folder.is_local
        else _bid(folder, generation, mine, pause)
    )
    # Entries of old are removed, so one that slept may get a number that is free again.
    if not won or last_generation(folder) > generation:
        raise taken(folder, generation)
    return generation


def _link(folder: Folder, generation: int, mine: Claim) -> bool:
    name = layout.generation_file(generation)
    if folder.create(name, mine):
        return True
    try:  # on a network file system the answer may be to a call that was repeated
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
    found = folder.list(layout.GENERATIONS)
    return [n for n in found if n != mine and (layout.generation_of(n) or 0) >= generation]


def check(folder: Folder, generation: int) -> None:
    """Raise unless this generation still has the folder."""
    last = last_generation(folder)
    if last > generation:
        raise taken(folder, last)
    if last < generation:
        raise FlowError(
            f"{folder.place} is not what it was: the entry of this flow is gone from it",
            hint="was the folder removed, or replaced, while the flow ran?",
        )


def holder(folder: Folder, generation: int) -> Claim | None:
    """Whoever has claimed a generation, as far as can be read."""
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
        f"another flow goes on from {folder.place}{who}, so this one must not",
        hint="only one can: end whatever has been started with checkpoint= or restore_from= there",
    )


def withdraw(folder: Folder, generation: int) -> None:
    """Leave a folder in which nothing was stored as it was found."""
    for name in folder.list(layout.GENERATIONS):
        if layout.generation_of(name) == generation:
            folder.remove(name)
