"""A flow runs for years: what its controls and sites keep does not depend on how many sites have
died, how many terms there were or how many epochs were cut."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.connectors.sources import rows
from holdfast.control.knowledge import decode
from holdfast.control.suspects import SUSPECTS_MAX
from holdfast.core.ids import SiteId
from holdfast.core.roster import TERM_IDS, ids_end
from holdfast.lab.sim import flows
from holdfast.lab.sim.explore import OPTIONS
from holdfast.lab.sim.timed import TimedWorld
from holdfast.protections import pairs
from holdfast.sinks import discard
from tests.support.control_years import ControlYears
from tests.support.growth import Sizes, grown, sizes
from tests.support.tiers import nightly

ENTRY_BYTES_MAX = 16_000
"""Of the arbiter's entry: ZooKeeper refuses more than 1 MiB. Most of it are reasons of deaths."""
TERM_DEATHS = 130
"""How many sites die in a term: more than any list remembers."""
HEADER_BYTES_MAX = 1_000
"""Of a message from a control to a site, in a flow of four sites and three stages."""


def controls(years: ControlYears) -> Sizes:
    return sizes({"control": years.nodes, "arbiter": years.store})


@pytest.mark.parametrize("deaths", [600, nightly(20_000)])
def test_controls_keep_no_more_after_a_year(deaths: int) -> None:
    years = ControlYears()
    warm = 3 * SUSPECTS_MAX  # by then everything that has a bound has reached it
    first: Sizes = {}
    later: Sizes = {}
    for death in range(1, deaths + 1):
        years.kill()
        years.pass_time()
        if death % TERM_DEATHS == 0:
            years.replace_leader()
        if death % 10 == 0:
            most = first if death <= warm else later
            most |= {p: max(n, most.get(p, 0)) for p, n in controls(years).items()}
    assert years.controller.protected
    assert years.failed_starts > deaths / 20 and years.terms == deaths // TERM_DEATHS
    assert _without_text(grown(first, later, 3)) == {}
    assert len(years.store.record.entry.value) < ENTRY_BYTES_MAX
    assert years.header_bytes_max < HEADER_BYTES_MAX


def _without_text(found: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Without the reasons of the last deaths, which are of different lengths."""
    texts = ("arbiter.record.entry.value", "[*]._error", ".dead[*]", "._reasons[*]", ".history[*]")
    return {place: grew for place, grew in found.items() if not place.endswith(texts)}


def test_a_number_is_not_used_twice_after_a_thousand_deaths_in_one_term() -> None:
    """Not that of a site whose launch the last leader could not commit, nor of one that it has
    launched and that has not registered."""
    years = ControlYears()
    while max(years.numbers) < TERM_IDS + 10:
        years.kill()
        years.pass_time()
    for _ in range(3):
        years.arbiter_is_away = True
        years.kill()
        years.arbiter_is_away = False
        years.replace_leader()
        for _ in range(5):
            years.pass_time()
        years.kill()  # raises if its replacement has the number of another one
        assert years.controller.protected


def test_a_site_whose_number_is_not_reserved_is_launched_when_that_is_committed() -> None:
    years = ControlYears()
    years.controller.roster.next_id = SiteId(TERM_IDS - 1)
    years.arbiter_is_away = True
    years.kill()
    assert TERM_IDS - 1 in years.numbers
    years.kill()
    assert TERM_IDS not in years.numbers, "the next leader could use it"
    years.arbiter_is_away = False
    years.pass_time()
    assert TERM_IDS in years.numbers
    assert decode(years.store.record.entry.value).next_id == ids_end(TERM_IDS + 1)


def world(rows_in: int) -> TimedWorld:
    flow = Flow("counts", protect=pairs(failure_domain="process"))
    source = flow.source("events", rows(flows._events(rows_in)), event_time="ts")
    source.key_by("k").window(time=20).agg(n=F.count()).sink("out", discard())
    return TimedWorld(flow, sites=4, seed=1, options=OPTIONS)


def die(world: TimedWorld, chance: random.Random) -> None:
    """Kill a site, but never the oldest, and wait until everything is protected again."""
    _go(world, lambda: world.controller.protected)
    site = chance.choice(sorted(world.nodes)[1:])
    world.crash(site)
    _go(world, lambda: site not in world.controller.addresses and world.controller.protected)


def _go(world: TimedWorld, until: Any) -> None:
    while not until():
        assert world.step() and not world.ended, world.error


BY_TIME = ("_gaps._gaps", ".by_epoch", "._waiting", ".kept")
"""Bounded by a time, by a number of epochs or by bytes that a short run does not reach."""


@pytest.mark.parametrize(("count", "rows_in"), [(8, 60_000), nightly(150, 800_000)])
def test_sites_keep_no_more_after_a_year(
    count: int, rows_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.core.roster.DEATHS_MAX", 3)
    run, chance = world(rows_in), random.Random(1)
    first: Sizes = {}
    later: Sizes = {}
    for death in range(1, 7 + count):
        die(run, chance)
        most, oldest = first if death <= 6 else later, run.nodes[min(run.nodes)]
        now = sizes({"controls": run.controls, "site": oldest}, texts=False)
        most |= {p: max(n, most.get(p, 0)) for p, n in now.items()}
    found = grown(first, later, 5)
    assert {p: n for p, n in found.items() if not any(name in p for name in BY_TIME)} == {}
