"""The conditions of the paper's simulations: its parameters, and where boxes are."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Parameters:
    """The paper's table 1; times in seconds."""

    rate: float = 500.0
    tuple_bytes: int = 50
    id_bytes: int = 8
    box_s: float = 10e-6
    delay_s: float = 5e-3
    bytes_per_s: float = 1e6
    detection_s: float = 0.1
    interval_s: float = 0.01


@dataclass(frozen=True, slots=True)
class Layout:
    """Which nodes each stream passes through, and how many of its boxes are on each.

    `selectivity` is what the first box of a node passes on, if not everything. With `spares` a
    node that is lost is rebuilt on a host of its own, not on one that has a node already.
    """

    paths: tuple[tuple[int, ...], ...]
    boxes: tuple[tuple[int, ...], ...]
    selectivity: dict[int, float] = field(default_factory=dict)
    spares: bool = True


def two_nodes(boxes: int = 1, selectivity: float = 1.0) -> Layout:
    """One node after another. The second has so many boxes, as wide as deep: a stream for each
    row of them. The first only passes the streams on."""
    side = round(boxes**0.5)
    if side * side != boxes:
        raise ValueError(f"{boxes} boxes do not make a square")
    return Layout(((0, 1),) * side, ((1, side),) * side, {1: selectivity})


def grid(nodes: int, boxes: int = 100) -> Layout:
    """So many boxes, as wide as deep, cut into so many nodes, as wide as deep."""
    side, across = round(boxes**0.5), round(nodes**0.5)
    if side * side != boxes or across * across != nodes or across > side:
        raise ValueError(f"{boxes} boxes on {nodes} nodes are no squares in a square")
    band = [place * across // side for place in range(side)]
    depths = tuple(band.count(column) for column in range(across))
    paths = tuple(tuple(band[row] * across + c for c in range(across)) for row in range(side))
    return Layout(paths, (depths,) * side, spares=False)
