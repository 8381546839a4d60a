"""What the machines know of a flow: its shape, and where its partitions are.

`Shape` is the plan reduced to numbers. `Layout` says which sites hold the copies of each
partition. Both are plain data that travel between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.ids import ExchangeId, SiteId, StageId
from holdfast.errors import HostError


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage: its exchanges, how many partitions it has, and how it merges its inputs."""

    id: StageId
    name: str
    kind: str
    partitions: int
    inputs: tuple[ExchangeId, ...] = ()
    outputs: tuple[ExchangeId, ...] = ()
    ordered: bool = True
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Shape:
    stages: tuple[StageShape, ...]
    producer_of: tuple[StageId, ...]
    """By exchange: the stage that feeds it."""
    consumer_of: tuple[StageId, ...]
    """By exchange: the stage that it feeds."""


@dataclass(frozen=True, slots=True)
class Domain:
    """Where a site really is; what can fail together with it."""

    process: str
    executor: str
    host: str
    application: str


@dataclass(frozen=True, slots=True)
class Layout:
    """Which sites hold the copies of each partition: ``sites[stage][partition]``."""

    number: int
    sites: tuple[tuple[tuple[SiteId, ...], ...], ...]
    sequencer: SiteId

    def sites_of(self, stage: StageId) -> list[SiteId]:
        """The sites that hold any partition of `stage`, in order."""
        return sorted({site for copies in self.sites[stage] for site in copies})

    def partitions_at(self, stage: StageId, site: SiteId) -> tuple[int, ...]:
        return tuple(p for p, copies in enumerate(self.sites[stage]) if site in copies)

    def lost_with(self, site: SiteId, shape: Shape) -> dict[str, list[int]]:
        """By stage name: the partitions that have no copy left when `site` is gone."""
        lost = {
            stage.name: [
                p for p, copies in enumerate(self.sites[stage.id]) if set(copies) == {site}
            ]
            for stage in shape.stages
        }
        return {name: partitions for name, partitions in lost.items() if partitions}


def place(shape: Shape, sites: Sequence[SiteId], number: int = 0) -> Layout:
    """Spread the partitions evenly: contiguous runs of each stage's partitions over the sites.

    A stage with a single partition (a sink, a source with one split) goes to a different site
    from the one before it, so that they do not all pile up on the first.
    """
    if not sites:
        raise HostError("a flow needs at least one site")
    placed, turn = [], 0
    for stage in shape.stages:
        if stage.partitions < len(sites):
            homes = [sites[(turn + p) % len(sites)] for p in range(stage.partitions)]
            turn += stage.partitions
        else:
            homes = [sites[p * len(sites) // stage.partitions] for p in range(stage.partitions)]
        placed.append(tuple((home,) for home in homes))
    return Layout(number, tuple(placed), sites[0])
