"""``holdfast paper mttf``: how long a flow lives under cluster pairs and partition pairs.

The Flux paper and thesis have formulas for it. Beside them stand a Monte Carlo simulation of sites
that fail (`holdfast.lab.paper.reliability`), with replicas where `holdfast.core.placement` puts
them, and one in which Holdfast's controller itself decides what is rebuilt where
(`holdfast.lab.paper.controlled`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.api.protection import Granularity, pairs
from holdfast.connectors.sinks import discard
from holdfast.core.ids import SiteId
from holdfast.core.layout import Shape
from holdfast.core.placement import place
from holdfast.lab.paper import controlled, reliability
from holdfast.lab.paper.figures import Series, Table, picture, show_table
from holdfast.lab.paper.reliability import YEAR_S, Estimate, Scheme, Times, domains, first_order
from holdfast.lab.workloads import dmz
from holdfast.plan.planner import plan, shape

SITES = (2, 4, 8, 16, 32, 64)
STANDBYS = (0, 1, 2, 3, 4)
FIXED_SITES = 16
"""Sites of the flow in the table by number of standbys."""
PARTITIONS = 128
APPROACHES = ("partition pairs", "disjoint pairs", "cluster pairs")
GRANULARITIES: dict[str, Granularity] = {
    "partition pairs": "partition",
    "cluster pairs": "cluster",
}
"""The approaches that Holdfast has. Disjoint pairs are what the papers' formula counts."""


@dataclass(frozen=True, slots=True)
class MttfEffort:
    """Numbers of simulated cycles, and of events under the real controller."""

    cycles: int = 100_000
    steps: int = 20_000
    controlled_sites: tuple[int, ...] = (2, 4, 8, 16)


FULL = MttfEffort()
QUICK = MttfEffort(10_000, 1_500, (4, 16))


# --- the papers' formulas -------------------------------------------------------------------------


def formula(approach: str, sites: int, times: Times, exposed_s: float) -> float:
    """Return the papers' mean time to failure in seconds. `exposed_s` is their time to recover,
    which with a standby is the catch-up."""
    pair = times.site_mttf_s**2 / exposed_s
    return 4 * pair / sites**2 if approach == "cluster pairs" else 2 * pair / sites


def exposed_s(times: Times, standbys: int) -> float:
    return times.catch_up_s if standbys else times.without_standby()


# --- simulations ----------------------------------------------------------------------------------


@cache
def shape_of(approach: str) -> Shape:
    """Return the papers' network-monitoring flow as the core sees it."""
    flow = dmz.dmz_flow(dmz.DmzRows().source(), discard())
    flow.protection = pairs(granularity=GRANULARITIES[approach], failure_domain="host")
    return shape(plan(flow), PARTITIONS)


@cache
def scheme_of(approach: str, sites: int) -> Scheme:
    """Return what Holdfast's placement makes of this number of sites."""
    if approach == "disjoint pairs":
        return Scheme.disjoint_pairs(sites)
    ids = [SiteId(n) for n in range(sites)]
    view = place(shape_of(approach), ids, domains(ids))
    return Scheme.of_view(view, whole_mirrors=approach == "cluster pairs")


Point = tuple[int, int]
"""Numbers of sites and standbys."""


class _Results:
    """Simulates every point once, and keeps the largest relative error of each origin."""

    def __init__(self, times: Times, effort: MttfEffort) -> None:
        self.times, self.effort = times, effort
        self.errors: dict[str, float] = {}

    def paper(self, approach: str, point: Point) -> float | None:
        if approach not in GRANULARITIES:
            return None
        return formula(approach, point[0], self.times, exposed_s(self.times, point[1])) / YEAR_S

    def first_order(self, approach: str, point: Point) -> float:
        scheme = scheme_of(approach, point[0])
        return first_order(scheme, self.times, exposed_s(self.times, point[1])) / YEAR_S

    def monte_carlo(self, approach: str, point: Point) -> float:
        scheme = scheme_of(approach, point[0])
        found = reliability.simulate(scheme, self.times, point[1], self.effort.cycles)
        return self._noted("Monte Carlo", found)

    def controller(self, approach: str, point: Point) -> float | None:
        if approach not in GRANULARITIES or point[0] not in self.effort.controlled_sites:
            return None
        found = controlled.simulate(
            shape_of(approach), *point, times=self.times, steps=self.effort.steps
        )
        return self._noted("Holdfast", found)

    def _noted(self, who: str, found: Estimate) -> float:
        relative = found.error_s / found.mean_s
        self.errors[who] = max(relative, self.errors.get(who, 0.0))
        return found.years

    def series(self, points: list[Point]) -> tuple[Series, ...]:
        origins: dict[str, Callable[[str, Point], float | None]] = {
            "paper": self.paper,
            "first order": self.first_order,
            "Monte Carlo": self.monte_carlo,
            "Holdfast": self.controller,
        }
        made = [
            Series(a, who, tuple(origin(a, point) for point in points))
            for a in APPROACHES
            for who, origin in origins.items()
        ]
        return tuple(s for s in made if any(v is not None for v in s.values))

    def error_note(self) -> str:
        within = " and ".join(f"{100 * e:.1f} % ({who})" for who, e in self.errors.items())
        return f"95 % confidence intervals are no wider than ± {within}."


# --- the tables -----------------------------------------------------------------------------------

WHO = (
    "paper: 2 M² / (N R) for partition pairs, 4 M² / (N² R) for cluster pairs, where M is a site's "
    "mean time to failure and R the time to recover: the catch-up if there is a standby, else the "
    "repair and the catch-up.",
    "first order: M² / (couples × R). Couples are ordered pairs of sites of which the second must "
    "not fail until the first has been replaced.",
)
REASONS = (
    "All pairs, factor 2: the formulas count one site of a pair as the one that fails first. "
    "Either may: a pair lives M² / (2 R). The same holds for two mirrors.",
    "Partition pairs, another factor 2: the formula has N/2 pairs that share nothing (disjoint "
    "pairs). With chained declustering, which the paper's experiment uses and so does Holdfast, a "
    "site shares partitions with the one before it and the one after it: two dangerous neighbours. "
    "On 2 sites there is only one; there the three are the same.",
    "Cluster pairs: N/2 sites of the other mirror are dangerous. On 4 sites that is two, as with "
    "partition pairs; only from 8 sites on do partition pairs live longer, if recovery takes "
    "equally long. On 2 sites cluster pairs are dataflow pairs. A mirror that is rebuilt over one "
    "link takes up to N/2 times as long and lives that much shorter.",
)


def by_sites(results: _Results, standbys: int) -> Table:
    what = "one standby" if standbys == 1 else f"{standbys or 'no'} standbys"
    series = results.series([(n, standbys) for n in SITES])
    more: tuple[str, ...]
    if standbys:
        more = (
            "Monte Carlo, many sites: the only standby is sometimes in use when the next site "
            "fails. That failure then lasts for a repair instead of a catch-up.",
            "Holdfast: the controller rebuilds one replica of a stage at a time, so that one of "
            "the two neighbours is safe after half of the catch-up. Two sites that fail one after "
            "the other are also rebuilt one after the other.",
            "Holdfast, partition pairs: in the long run the chain dissolves. A missing replica "
            "joins the site with the least load, whatever that site shares with others, so after "
            "many failures a site has more than two dangerous neighbours. The short runs of "
            "--quick hardly show it, nor a standby that is in use when it is needed.",
        )
    else:
        more = (
            "Holdfast, partition pairs: it does not wait for the repair. What a site had is "
            "rebuilt on sites that are left, if there are more than two, and the repaired site "
            "becomes a standby. Cluster pairs must wait: no site of the other mirror may help.",
        )
    return Table(
        "standby" if standbys else "alone",
        f"Mean time to failure (years) by number of sites, {what}",
        "sites",
        "mean time to failure (years)",
        SITES,
        series,
        (*WHO, *REASONS, *more, results.error_note()),
        log=True,
        log_x=True,
        significant=True,
    )


def by_standbys(results: _Results) -> Table:
    return Table(
        "standbys",
        f"Mean time to failure (years) of {FIXED_SITES} sites by number of standbys",
        "standbys",
        "mean time to failure (years)",
        STANDBYS,
        results.series([(FIXED_SITES, s) for s in STANDBYS]),
        (
            "Monte Carlo: with two standbys one is nearly always there. More of them change "
            "nothing.",
            "Holdfast, partition pairs: standbys hardly matter, because sites that are left or "
            "that have come back do as well. It stays below the chain, which dissolves over time: "
            "with several standbys the replicas of one site go to different ones at once.",
            results.error_note(),
        ),
        log=True,
        significant=True,
    )


def tables(
    times: Times, effort: MttfEffort, tell: Callable[[str], None] = lambda text: None
) -> list[Table]:
    computed = []
    for name, make in (
        ("sites with a standby", lambda r: by_sites(r, 1)),
        ("sites without a standby", lambda r: by_sites(r, 0)),
        ("standbys", by_standbys),
    ):
        tell(name)
        computed.append(make(_Results(times, effort)))
    return computed


def run(out: Path | None, times: Times, quick: bool, console: Console) -> dict[str, Any]:
    """Print the tables, draw them into the folder `out` if it is given, and return them."""
    with console.status("simulating") as status:
        computed = tables(
            times, QUICK if quick else FULL, lambda text: status.update(f"simulating {text}")
        )
    console.print(
        f"A site fails every {_long(times.site_mttf_s)}; it is back after "
        f"{_long(times.repair_s)}; a standby has caught up after {_long(times.catch_up_s)}.\n",
        highlight=False,
    )
    for table in computed:
        show_table(table, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for table in computed:
            (out / f"mttf-{table.key}.svg").write_text(picture(table))
        console.print(f"{len(computed)} figures are in {out}", highlight=False)
    return {
        "paper": "mttf",
        "site_mttf_s": times.site_mttf_s,
        "repair_s": times.repair_s,
        "catch_up_s": times.catch_up_s,
        "tables": {t.key: t.to_dict() for t in computed},
    }


def _long(seconds: float) -> str:
    """Format a duration in its natural unit.

    >>> _long(5.0), _long(600.0), _long(2_592_000.0)
    ('5 s', '10 min', '30 days')
    """
    for unit, size in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
