"""The layout of a store's folder. Only this module creates and parses the names in it.

    generations/000002.arrow                    the claim of a generation; the highest one is valid
    manifests/000002.arrow                      the manifest of a generation
    checkpoints/000002-000000000815/...         state after an epoch, by task, site and table
    checkpoints/000002-000000000990-stop/...    the same, of a flow that was stopped after it
    records/000002/000000000816-...             the records of the epochs after a checkpoint
    push_batches/000002/3/...                   rows of the push source 3, stored only here

All names except those in `generations` carry the number of the generation that wrote the file, so
two processes never write a file of the same name. A history (`holdfast.spark.history`) has `state`
and `results` in a folder of its own, and no manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

STATE, RESULTS = "state", "results"
GENERATIONS, MANIFESTS = "generations", "manifests"
CHECKPOINTS, RECORDS, PUSH_BATCHES = "checkpoints", "records", "push_batches"
FIRST_FORMAT = "manifest.arrow"
"""The manifest's name in the format without checksums."""

_GENERATION = re.compile(rf"({GENERATIONS}|{MANIFESTS})/(\d{{6,}})(-[0-9a-f-]+)?\.arrow")
_CHECKPOINT = re.compile(rf"{CHECKPOINTS}/(\d{{6,}})-(\d{{12,}})(-stop)?")
_RECORDS = re.compile(rf"{RECORDS}/(\d{{6,}})/(\d{{12,}})-(\d{{12,}})\.arrow")
_PUSH_BATCH = re.compile(rf"{PUSH_BATCHES}/(\d{{6,}})/(\d+)/(\d{{12,}})-(\d+)-(\d+)\.arrow")


def generation_file(generation: int, bid: str = "") -> str:
    """Return the name of a claim. `bid` distinguishes rivals where a name cannot be created
    exclusively."""
    return f"{GENERATIONS}/{generation:06d}{'-' if bid else ''}{bid}.arrow"


def manifest_file(generation: int) -> str:
    return f"{MANIFESTS}/{generation:06d}.arrow"


def generation_of(name: str) -> int | None:
    """Return the generation of a claim or a manifest; None for other names.

    >>> generation_of("manifests/000012.arrow"), generation_of("manifests/x.arrow")
    (12, None)
    """
    match = _GENERATION.fullmatch(name)
    return int(match[2]) if match else None


def latest(names: Iterable[str]) -> int:
    """Return the highest generation of these names; -1 if there is none."""
    return max((g for name in names if (g := generation_of(name)) is not None), default=-1)


def task_file(
    generation: int, epoch: int, task: tuple[int, int], site: int, what: str, *, stop: bool = False
) -> str:
    folder = f"{CHECKPOINTS}/{generation:06d}-{epoch:012d}{'-stop' if stop else ''}"
    return f"{folder}/{task[0]}-{task[1]}-{site}-{what}.arrow"


class CheckpointName(NamedTuple):
    generation: int
    epoch: int


def checkpoint_name(folder: str) -> CheckpointName | None:
    """Parse the name of a checkpoint's folder; None for other names.

    >>> checkpoint_name("checkpoints/000002-000000000990-stop")
    CheckpointName(generation=2, epoch=990)
    """
    match = _CHECKPOINT.fullmatch(folder)
    return CheckpointName(int(match[1]), int(match[2])) if match else None


class RecordsName(NamedTuple):
    generation: int
    first: int
    last: int


def records_file(generation: int, first: int, last: int) -> str:
    return f"{RECORDS}/{generation:06d}/{first:012d}-{last:012d}.arrow"


def records_name(name: str) -> RecordsName | None:
    """Parse the name of a file of epoch records; None for other names.

    >>> records_name(records_file(2, 7, 9))
    RecordsName(generation=2, first=7, last=9)
    """
    match = _RECORDS.fullmatch(name)
    return RecordsName(*map(int, match.groups())) if match else None


class PushBatchName(NamedTuple):
    generation: int
    source: int
    number: int
    rank: int
    base: int
    """Push batches that the replica held when it became the leader of this rank."""


def push_batch_file(generation: int, source: int, number: int, rank: int, base: int) -> str:
    return f"{PUSH_BATCHES}/{generation:06d}/{source}/{number:012d}-{rank}-{base}.arrow"


def push_batch_name(name: str) -> PushBatchName | None:
    """Parse the name of a push batch's file; None for other names.

    >>> push_batch_name(push_batch_file(2, 0, 7, 1, 4))
    PushBatchName(generation=2, source=0, number=7, rank=1, base=4)
    """
    match = _PUSH_BATCH.fullmatch(name)
    return PushBatchName(*map(int, match.groups())) if match else None


def is_known(name: str) -> bool:
    """Return whether this is the name of a file of a store.

    >>> is_known("checkpoints/000000-000000000007/1-0-2-groups.arrow"), is_known("../secret.arrow")
    (True, False)
    """
    folder, _, file = name.rpartition("/")
    return (
        generation_of(name) is not None
        or records_name(name) is not None
        or push_batch_name(name) is not None
        or (_CHECKPOINT.fullmatch(folder) is not None and file.endswith(".arrow"))
        or (name.startswith((f"{STATE}/", f"{RESULTS}/")) and ".." not in name.split("/"))
    )
