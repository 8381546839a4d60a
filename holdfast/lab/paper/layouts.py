"""The conditions of the paper's simulations: its parameters, and the placement of boxes."""

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
    k: int = 1
    """How many nodes may be lost at once."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The nodes on the path of each stream, and the number of its boxes on each.

    `selectivity` is the share of tuples that the first box of a node passes, by default all. With
    `spares`, a lost node is rebuilt on a separate machine instead of one that already has a node.
    """

    paths: tuple[tuple[int, ...], ...]
    boxes: tuple[tuple[int, ...], ...]
    selectivity: dict[int, float] = field(default_factory=dict)
    spares: bool = True


def two_nodes(boxes: int = 1, selectivity: float = 1.0) -> Layout:
    """Return a layout of two nodes in sequence. The second has a square of `boxes`, with a stream
    for each row; the first only forwards the streams."""
    side = round(boxes**0.5)
    if side * side != boxes:
        raise ValueError(f"the number of boxes must be a square, not {boxes}")
    return Layout(((0, 1),) * side, ((1, side),) * side, {1: selectivity})


def in_a_row(nodes: int) -> Layout:
    """Return a layout of one stream through nodes of one box each."""
    return Layout((tuple(range(nodes)),), ((1,) * nodes,))


def grid(nodes: int, boxes: int = 100) -> Layout:
    """Return a layout of a square of `boxes`, divided into a square of `nodes`."""
    side, across = round(boxes**0.5), round(nodes**0.5)
    if side * side != boxes or across * across != nodes or across > side:
        raise ValueError(
            f"{boxes} boxes on {nodes} nodes: both must be squares, with at least a box per node"
        )
    band = [place * across // side for place in range(side)]
    depths = tuple(band.count(column) for column in range(across))
    paths = tuple(tuple(band[row] * across + c for c in range(across)) for row in range(side))
    return Layout(paths, (depths,) * side, spares=False)
