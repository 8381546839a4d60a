"""``holdfast paper hwang05``: repeats the simulations of *A Comparison of Stream-Oriented
High-Availability Algorithms* (Hwang and others, 2005), section 5.

It compares three sets of figures: the paper's, as far as its text has them; those of a model of the
paper's own approaches (`holdfast.lab.paper.model`); and those of Holdfast's protections on the real
nodes, under the same conditions (`holdfast.lab.paper.real`). All are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.lab.paper import measure, real
from holdfast.lab.paper.figures import Line, Series, Table, drawn, known, picture, show_table
from holdfast.lab.paper.layouts import Layout, Parameters, grid, in_a_row, two_nodes
from holdfast.lab.paper.measure import Recovery, mean
from holdfast.lab.paper.model import APPROACHES, Approach
from holdfast.ui.drawing import Point

INTERVALS_MS = (10, 20, 40, 60, 80, 100)
BOXES = (1, 4, 9, 16, 25)
SELECTIVITIES = (1.0, 0.8, 0.6, 0.4, 0.2)
NODES = (4, 16, 36, 64, 100)
LOSSES = (1, 2, 3)
"""Values of K: how many nodes may be lost at once."""
IN_A_ROW = 5
"""Nodes in a row in the model of K-safety: more than the largest K."""
STAGES = 3
"""Keyed stages in a row in Holdfast's flow for it."""
SHOWN_MS = 160.0
"""Time after a failure that figure 9 shows."""
QUIET_MS = 30.0
"""If nothing arrives for longer, its line has a gap."""

# The values in the paper's text and tables. The text does not have the values of its figures.
FULL_RECOVERY_MS = {
    "passive": (11.0, None, None, None, None, None),
    "active": (8.0, None, None, None, None, None),
    "upstream": (12.0, None, 12.5, None, 14.0, None),
}
BY_BOXES = {
    "passive": (106.3, 109.4, 112.4, 115.7, 118.7),
    "active": (110.0,) * 5,
    "upstream": (6.0,) * 5,
}
BY_SELECTIVITY = {
    "passive": (118.5, 98.8, 78.3, 57.1, 33.2),
    "active": (110.0,) * 5,
    "upstream": (6.0,) * 5,
}
BANDWIDTH = {
    "passive": (None,) * 5,
    "active": (None, None, None, None, 1800.0),
    "upstream": (100.0, None, None, None, 900.0),
}
DISTRIBUTED_MS = {
    "passive": (23.0, 12.0, None, None, None),
    "active": (None,) * 5,
    "upstream": (36.0, 15.0, None, None, 7.0),
}


def formula(approach: str, parameters: Parameters) -> float:
    """Return the overhead with one box in percent, by the paper's formula: tuples that are sent
    twice, and two or three identifiers per interval."""
    tuples = parameters.rate * parameters.tuple_bytes * parameters.interval_s
    twice = 0.0 if approach == "upstream" else 1.0
    identifiers = 3 if approach == "active" else 2
    return 100.0 * (twice + identifiers * parameters.id_bytes / tuples)


def partial_formula(approach: str, parameters: Parameters) -> float | None:
    """Return the partial recovery in milliseconds by the paper's formulas: the links until the
    first tuple comes, and the time of the duplicates on a link. With passive standby the paper
    leaves open which links."""
    if approach == "passive":
        return None
    links = 1 if approach == "active" else 2
    delay = links * parameters.delay_s + (links - 1) * parameters.box_s
    duplicates = parameters.rate * (parameters.interval_s / 2 + 2 * parameters.delay_s)
    return 1e3 * (delay + duplicates * parameters.tuple_bytes / parameters.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Effort:
    """Durations and numbers of the simulations."""

    overhead_s: float = 20.0
    boxes_s: float = 5.0
    recoveries: int = 25
    grids: int = 3
    grid_s: float = 0.3
    real_s: float = 1.0
    real_recoveries: int = 3
    real_places: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Indexes of the numbers of boxes, and of the selectivities, to simulate."""
    protections: tuple[str, ...] = (*APPROACHES, "rollback", "pairs")


FULL = Effort()
QUICK = Effort(3.0, 0.8, 5, 1, 0.1, 0.3, 1, (0, 4), APPROACHES)


def every(interval_ms: float) -> Parameters:
    return Parameters(interval_s=interval_ms / 1e3)


# --- the tables -----------------------------------------------------------------------------------


def overhead_by_interval(effort: Effort) -> Table:
    def model(approach: Approach, ms: float) -> float:
        return measure.overhead(two_nodes(), approach, every(ms), 1, effort.overhead_s)

    def ours(name: str, ms: float) -> float:
        seconds = max(effort.real_s, 10 * ms / 1e3)
        return real.overhead(real.PaperRun(name, every(ms), seconds=seconds))

    short, long = (real.PaperRun("none", every(ms), seconds=effort.real_s) for ms in (10, 100))
    acks, a_row, a_row_later = short.acks(), short.bytes_a_row(), long.bytes_a_row()
    by_formula: dict[str, Any] = {
        a: tuple(formula(a, every(ms)) for ms in INTERVALS_MS) for a in APPROACHES
    }
    return Table(
        "overhead",
        "Figure 8: overhead (%) against the communication interval (ms)",
        "communication interval (ms)",
        "overhead (%)",
        INTERVALS_MS,
        _series(by_formula, INTERVALS_MS, model, ours, effort.protections),
        (
            "paper: its formulas; at 10 ms its simulation has 106.3, about 110 and about 6 %.",
            "model: within 0.3 percentage points. Its tuples arrive at random, and it sends "
            "identifiers only when they have changed.",
            "Holdfast, upstream and rollback: levels are part of acks that are sent anyway to "
            f"bound buffers; those are {acks:.1f} % of the rows at 10 ms, and are not counted.",
            "Holdfast: a bundle has an Arrow header, digests and order keys. A row of 50 bytes "
            f"therefore takes {a_row:.0f} on the wire with five rows per epoch, at 10 ms; at "
            f"100 ms {a_row_later:.0f}.",
            "Holdfast, passive: a checkpoint has the output, the changed state and the removed "
            "keys: three messages, each with an Arrow header, and at 10 ms each as large as a "
            "bundle. At longer intervals headers matter less.",
            "Holdfast, pairs and rollback: not in the paper. They send the same as active and "
            "upstream.",
        ),
        log=True,
    )


def partial_by_interval(effort: Effort) -> Table:
    def model(approach: Approach, ms: float) -> float:
        return mean(r.partial_ms for r in _modelled(approach, ms, effort.recoveries))

    def ours(name: str, ms: float) -> float:
        return mean(r.partial_ms for r in _recoveries(name, ms, effort.real_recoveries))

    by_formula: dict[str, Any] = {
        a: tuple(_rounded(partial_formula(a, every(ms))) for ms in INTERVALS_MS) for a in APPROACHES
    }
    return Table(
        "partial",
        "Figure 9: partial recovery (ms) against the communication interval (ms)",
        "communication interval (ms)",
        "partial recovery (ms)",
        INTERVALS_MS,
        _series(by_formula, INTERVALS_MS, model, ours, effort.protections),
        (
            "paper: its formulas. Figure 9 is one run at 10 ms, and the text has about 4 ms for "
            "active, 9 for upstream, and in that run the same as active for passive.",
            "model: the duplicates are sent before the first new tuple. Those that came while the "
            "failure was detected are sent as well, but behind it.",
            "model, active: the second node drops results when the first one tells it to, which "
            "it does every interval, and it learns of them every interval: on average half of one "
            "more than in the formula.",
            "model, passive: the standby has the results up to its last checkpoint, and most are "
            "duplicates. The first new tuple comes from upstream: two links.",
            "Holdfast: a replica that recovers asks for what it lacks, so there are hardly any "
            "duplicates; but it needs more links, as said below for the full recovery. An epoch is "
            "sent as a whole, so the first row comes with the others of its epoch.",
        ),
    )


def recovery_by_interval(effort: Effort) -> Table:
    def model(approach: Approach, ms: float) -> float:
        return mean(r.full_ms for r in _modelled(approach, ms, effort.recoveries))

    def ours(name: str, ms: float) -> float:
        return mean(r.full_ms for r in _recoveries(name, ms, effort.real_recoveries))

    return Table(
        "recovery",
        "Figure 10: full recovery (ms) against the communication interval (ms)",
        "communication interval (ms)",
        "full recovery (ms)",
        INTERVALS_MS,
        _series(FULL_RECOVERY_MS, INTERVALS_MS, model, ours, effort.protections),
        (
            "paper: the rounded values in the text; detection (100 ms) is not included.",
            "model: passive and upstream take one or two milliseconds longer. Two links of 5 ms "
            "take at least 10 ms, and one at least 5, but the paper has partial recoveries of 9 "
            "and 4 ms: we do not know what it leaves out. With the interval upstream grows more "
            "slowly, because its level-1 acks immediately follow level 0.",
            "Holdfast, active and pairs: consumers immediately ask the other replica, which sends "
            "the missing epochs: two links. Passive: the new view, the request of the standby, the "
            "answer, and on to the sink: four. Upstream and rollback: the view, a request and an "
            "answer about what is available, a request and an answer with what is needed, the view "
            "in which the task counts, and on to the sink: seven. The rest is bytes: a row takes "
            "more of them (see above).",
        ),
    )


def overhead_by_boxes(effort: Effort) -> Table:
    def model(approach: Approach, boxes: float) -> float:
        layout = two_nodes(int(boxes))
        return measure.overhead(layout, approach, every(10), 1, effort.boxes_s)

    def ours(name: str, boxes: float) -> float:
        return real.overhead(
            real.PaperRun(name, every(10), boxes=int(boxes), seconds=effort.real_s)
        )

    return Table(
        "boxes",
        "Table 4: overhead (%) against the number of boxes",
        "boxes",
        "overhead (%)",
        BOXES,
        _series(BY_BOXES, BOXES, model, _at(ours, BOXES, effort), APPROACHES),
        (
            "model: the number of streams equals the number of boxes in each. Every box has a "
            "queue whose head is part of a checkpoint; so are the tuples between boxes at that "
            "moment (about 0.5 %, which the paper does not seem to have).",
            "Holdfast: operators between two changes of key are one stage without queues, so their "
            "number costs nothing. There is one stream.",
        ),
    )


def overhead_by_losses(effort: Effort) -> Table:
    def model(approach: Approach, k: float) -> float:
        parameters = replace(every(10), k=int(k))
        return measure.overhead(in_a_row(IN_A_ROW), approach, parameters, 1, effort.boxes_s)

    def ours(name: str, k: float) -> float | None:
        if k > 1 and name not in ("pairs", "upstream"):
            return None
        parameters, seconds = replace(every(10), k=int(k)), effort.real_s
        return real.overhead(real.PaperRun(name, parameters, seconds=seconds, stages=STAGES))

    linear: dict[str, Any] = {
        a: tuple(round(k * formula(a, every(10)), 2) for k in LOSSES) for a in APPROACHES
    }
    names = tuple(dict.fromkeys((*APPROACHES, "pairs")))
    return Table(
        "k",
        "Section 4.4: overhead (%) against K, the number of nodes that may be lost at once",
        "K",
        "overhead (%)",
        LOSSES,
        _series(linear, LOSSES, model, ours, names),
        (
            "paper: it says that the overhead is linear in K and has no figures; these are K times "
            "those of one.",
            "model, passive and active: K standbys or further nodes. The acknowledgement of the "
            "input is sent once for all standbys, so it is a little less than K times as much.",
            f"model, upstream: K + 1 levels of acknowledgements, on {IN_A_ROW} nodes in a row. One "
            "of a high level implies those below it, and close to the client there are fewer "
            "levels, because the client is not lost. K = 3 costs less than twice as much as K = 1.",
            f"Holdfast: {STAGES} stages in a row, each protected. Its passive and active standby "
            "have K = 1 only; pairs(replicas=K + 1) and upstream(k=K) have any.",
            "Holdfast, pairs: rows are K times as many, but every replica acknowledges to every "
            "replica of its producers: these grow with the square of K + 1.",
            "Holdfast, upstream: an ack has another number for each level.",
        ),
        log=True,
    )


def overhead_by_selectivity(effort: Effort) -> Table:
    def model(approach: Approach, selectivity: float) -> float:
        layout = two_nodes(25, selectivity)
        return measure.overhead(layout, approach, every(10), 1, effort.boxes_s)

    def ours(name: str, selectivity: float) -> float:
        run = real.PaperRun(name, every(10), selectivity=selectivity, seconds=effort.real_s)
        return real.overhead(run)

    return Table(
        "selectivity",
        "Table 4: overhead (%) against the selectivity, 25 boxes",
        "selectivity",
        "overhead (%)",
        SELECTIVITIES,
        _series(BY_SELECTIVITY, SELECTIVITIES, model, _at(ours, SELECTIVITIES, effort), APPROACHES),
        (
            "model: the first box of each stream filters, so that the whole network has the "
            "selectivity; only this reproduces the paper's figures. It does not send unchanged "
            "identifiers: at 0.2 that is every third.",
            "model, active and upstream: slightly less at low selectivities, where the paper has "
            "them constant: the model sends nothing if there is nothing new to confirm.",
            "Holdfast, passive: a checkpoint also has the state, here of the window of the last "
            "row, whose size does not depend on the filter behind it.",
        ),
    )


def distribution(effort: Effort) -> list[Table]:
    @cache
    def sent(approach: Approach, nodes: float) -> float:
        return sum(measure.bandwidth(grid(int(nodes)), approach, every(10), 1, effort.grid_s))

    def relative(approach: Approach, nodes: float) -> float:
        return 100.0 * sent(approach, nodes) / sent("upstream", NODES[0])

    def model(approach: Approach, nodes: float) -> float:
        layout = grid(int(nodes))
        return mean(
            measure.recovery(layout, approach, every(10), s, _victim(layout, s)).full_ms
            for s in range(effort.grids)
        )

    none = (
        "Holdfast: not measured. Keys decide how its partitions are spread over sites, and boxes "
        "without a change of key between them cannot be on different sites.",
    )
    return [
        Table(
            "distribution-bandwidth",
            "Figure 12: bandwidth (%) of 100 boxes by number of nodes; 100 % is upstream on 4",
            "nodes",
            "bandwidth (%)",
            NODES,
            _series(BANDWIDTH, NODES, relative),
            (
                "model: ten streams through ten boxes each, divided into squares. Only traffic "
                "between nodes is counted, not traffic from sources or to the client: only this "
                "reproduces the paper's 900 and 1800 %.",
                *none,
            ),
        ),
        Table(
            "distribution-recovery",
            "Figure 12: full recovery (ms) of one node by number of nodes",
            "nodes",
            "full recovery (ms)",
            NODES,
            _series(DISTRIBUTED_MS, NODES, model),
            (
                "model: as seen by the next node. Upstream backup recovers on a random node, which "
                "also has its own work.",
                "model: it does not go below the 10 ms of two links, unlike the paper's 7 ms. On "
                "100 nodes of one box each its recovery is that of figure 10, for which the paper "
                "has 12 ms.",
                "model, active: the retained tuples must be sent, and smaller nodes retain fewer. "
                "The paper says that active standby does not gain from distribution.",
                *none,
            ),
        ),
    ]


def _victim(layout: Layout, seed: int) -> int:
    """Return a node that gets its input from another node."""
    path = layout.paths[seed * 7 % len(layout.paths)]
    return path[1 + seed % (len(path) - 1)]


@cache
def _modelled(approach: Approach, ms: float, count: int) -> list[Recovery]:
    return [measure.recovery(two_nodes(), approach, every(ms), s, 1) for s in range(count)]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


@cache
def _recoveries(name: str, ms: float, count: int) -> list[Recovery]:
    return [real.recovery(real.PaperRun(name, every(ms), seed=seed)) for seed in range(count)]


def _at(
    ours: Callable[[str, float], float], places: Sequence[float], effort: Effort
) -> Callable[[str, float], float | None]:
    """Restrict `ours` to the places that `effort` selects."""
    return lambda name, x: ours(name, x) if places.index(x) in effort.real_places else None


def _series(
    paper: dict[str, Any],
    places: Sequence[float],
    model: Callable[[Approach, float], float],
    ours: Callable[[str, float], float | None] | None = None,
    names: Sequence[str] = (),
) -> tuple[Series, ...]:
    published = [Series(a, "paper", tuple(paper[a])) for a in APPROACHES]
    modelled = [
        Series(a, "model", tuple(round(model(a, x), 2) for x in places)) for a in APPROACHES
    ]
    measured = []
    for name in names:
        values = [ours(name, x) for x in places] if ours is not None else []
        rounded = tuple(None if v is None else round(v, 2) for v in values)
        measured.append(Series(name, "Holdfast", rounded))
    return (*published, *modelled, *measured)


# --- the command ----------------------------------------------------------------------------------


def tables(effort: Effort, tell: Callable[[str], None] = lambda text: None) -> list[Table]:
    """Compute all tables in the paper's order."""
    computed: list[Table] = []
    for make in (
        overhead_by_interval,
        partial_by_interval,
        recovery_by_interval,
        overhead_by_boxes,
        overhead_by_selectivity,
        overhead_by_losses,
    ):
        tell(make.__name__.replace("_", " "))
        computed.append(make(effort))
    tell("distribution")
    return computed + distribution(effort)


def dynamics(names: Sequence[str]) -> dict[str, str]:
    """Draw figure 9: when tuples arrive after a failure, and how long each took; one run each of
    the model and of Holdfast."""
    modelled: list[Line] = []
    for approach in APPROACHES:
        (arrivals,), fails_at = measure.crashed(two_nodes(), approach, every(10), 1, 1)
        modelled.append((approach, "model", _shown(measure.delays(arrivals, fails_at))))
    measured: list[Line] = []
    for name in names:
        rows, fails_at = real.crashed(real.PaperRun(name, every(10), seed=1))
        measured.append((name, "Holdfast", _shown(measure.delays(rows, fails_at))))
    return {
        f"dynamics-{who.lower()}": drawn(
            f"Figure 9: delay of tuples after a failure at 0 ms, detected at 100 ms ({who})",
            "arrival (ms)",
            "delay (ms)",
            lines,
            marks=False,
            event=(0.0, "failure"),
        )
        for who, lines in (("model", modelled), ("Holdfast", measured))
    }


def _shown(delays: Sequence[Point]) -> list[Point | None]:
    """Return the points to draw, with a gap where nothing arrived."""
    points: list[Point | None] = []
    before = delays[0][0]
    for point in delays:
        points += [None] if point[0] - before > QUIET_MS else []
        points += [point] if point[0] <= SHOWN_MS else []
        before = point[0]
    return points


def tradeoff(computed: Sequence[Table]) -> str:
    """Draw figure 11: overhead against recovery, a point for each interval."""
    by_key = {table.key: table for table in computed}
    overhead, recovery = by_key["overhead"], by_key["recovery"]
    lines = []
    for series in overhead.series:
        times = recovery.of(series.approach, series.who)
        lines.append((series.approach, series.who, known(times, series.values)))
    title = "Figure 11: overhead (%) against full recovery (ms), for each interval"
    return drawn(title, "full recovery (ms)", "overhead (%)", lines, log=True)


def run(out: Path | None, quick: bool, console: Console) -> dict[str, Any]:
    """Print the tables, draw them into the folder `out` if it is given, and return them."""
    effort = QUICK if quick else FULL
    with console.status("simulating") as status:
        computed = tables(effort, lambda text: status.update(f"simulating {text}"))
    for table in computed:
        show_table(table, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        pictures = {table.key: picture(table) for table in computed}
        pictures["tradeoff"] = tradeoff(computed)
        pictures |= dynamics(effort.protections)
        for name, svg in pictures.items():
            (out / f"hwang05-{name}.svg").write_text(svg)
        console.print(f"{len(pictures)} figures are in {out}", highlight=False)
    return {"paper": "hwang05", "tables": {t.key: t.to_dict() for t in computed}}
