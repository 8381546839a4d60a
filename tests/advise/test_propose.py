"""What is proposed: within bounds the cheapest, and if nothing is, what comes closest."""

import json
from dataclasses import replace

import pytest

from holdfast.advise.model import Choice, predict
from holdfast.advise.propose import COMBINATIONS_MAX, Advice, Bounds, propose
from tests.support.advise_facts import CONSTANTS, RUNNING, WINDOW, flow, stage

FREE = Bounds(recovery_ms=5_000, overhead=0.5)


def advice(*keyed: object, bounds: Bounds = FREE) -> Advice:
    return propose(flow(*keyed), bounds, CONSTANTS)  # type: ignore[arg-type]


def test_recent_state_is_rebuilt() -> None:
    found = advice(WINDOW)
    assert found.choices == {1: Choice("upstream")} and not found.missed
    assert found.code() == ['flow = Flow("made-up", protect=upstream())']
    assert "last 1 s" in found.proposed[0].why


def test_state_of_everything_has_checkpoints_as_seldom_as_may_be() -> None:
    bounds = Bounds(recovery_ms=200, overhead=0.3)
    found = advice(RUNNING, bounds=bounds)
    (choice,) = found.choices.values()
    assert choice.name == "passive"
    assert found.predicted.recovery_ms <= 200
    longer = {1: Choice("passive", round(choice.every_ms * 1.1))}
    assert predict(found.facts, longer, CONSTANTS).recovery_ms > 200


def test_two_losses_take_a_standby_or_a_replica_more() -> None:
    bounds = Bounds(recovery_ms=200, overhead=0.3)
    once, twice = (advice(RUNNING, bounds=replace(bounds, losses=n)) for n in (1, 2))
    (one,), (two,) = once.choices.values(), twice.choices.values()
    assert (two.name, two.losses) == ("passive", 2)
    given = f"passive(standbys=2, interval={two.every_ms / 1e3:g})"
    assert twice.code() == [f'flow = Flow("made-up", protect={given}, losses=2)']
    assert twice.predicted.overhead > once.predicted.overhead and one.losses == 1
    tight = advice(WINDOW, bounds=Bounds(10, 0.9, losses=2))
    assert tight.code() == ['flow = Flow("made-up", protect=pairs(replicas=3), losses=2)']
    assert advice(WINDOW, bounds=replace(FREE, losses=2)).code() == [
        'flow = Flow("made-up", protect=upstream(), losses=2)'
    ]


def test_a_tight_bound_takes_a_second_replica() -> None:
    found = advice(WINDOW, RUNNING, bounds=Bounds(recovery_ms=10, overhead=0.5))
    assert {c.name for c in found.choices.values()} == {"pairs"}
    assert "immediately" in found.proposed[0].why


def test_state_that_is_large_and_seldom_worked_on_is_computed_twice() -> None:
    rings = replace(RUNNING, work=0.001, given_bytes=500_000_000)
    assert advice(rings).choices == {1: Choice("pairs")}


def test_neighbours_may_differ() -> None:
    found = advice(WINDOW, RUNNING, WINDOW, bounds=Bounds(300, 0.3))
    names = [c.name for c in found.choices.values()]
    assert names == ["upstream", "passive", "upstream"]
    first, second = found.code()
    assert first == 'flow = Flow("made-up", protect=upstream())'
    assert second.startswith('.key_by("key").protect(passive(interval=')


@pytest.mark.parametrize("bounds", [Bounds(50, 0.4), Bounds(500, 0.15), Bounds(5_000, 0.1)])
def test_nothing_cheaper_is_within_the_bounds(bounds: Bounds) -> None:
    found = advice(WINDOW, RUNNING, bounds=bounds)
    assert not found.missed
    assert found.predicted.recovery_ms <= bounds.recovery_ms
    assert found.predicted.overhead <= bounds.overhead
    for proposed in found.proposed:
        for other in proposed.turned_down:
            if other.predicted is not None and bounds.excess(other.predicted) == 0:
                assert other.predicted.overhead >= found.predicted.overhead - 0.001


def test_impossible_bounds_are_said() -> None:
    found = advice(WINDOW, RUNNING, bounds=Bounds(recovery_ms=10, overhead=0.01))
    assert found.missed and found.proposed
    (overhead,) = [m for m in found.missed if m.startswith("overhead")]
    points = 100 * (found.predicted.overhead - 0.01)
    assert f"{points:.1f} points too much" in overhead
    assert not found.to_dict()["fits"]


def test_a_bound_that_is_nearly_met_is_nearer_than_one_that_is_not() -> None:
    facts = flow(RUNNING)
    bounds = Bounds(recovery_ms=30.0, overhead=0.09)  # passive() takes 32 ms at least
    assert propose(facts, bounds, CONSTANTS).choices[1].name == "passive"


def test_what_is_turned_down_and_why() -> None:
    found = advice(RUNNING)
    (proposed,) = found.proposed
    others = {t.name: t for t in proposed.turned_down}
    assert others["upstream()"].predicted is None
    assert "all rows of a key" in others["upstream()"].why
    assert others["pairs()"].predicted is not None
    assert proposed.choice.name not in {name.partition("(")[0] for name in others}


def test_rollback_needs_uniform_flows() -> None:
    facts = replace(flow(WINDOW), uniform=False)
    (proposed,) = propose(facts, FREE, CONSTANTS).proposed
    (rollback,) = [t for t in proposed.turned_down if t.name == "rollback()"]
    assert "same length" in rollback.why


def test_arrival_merging_cannot_be_protected() -> None:
    found = advice(stage("arrival", ordered=False))
    assert found.choices == {1: Choice("none")}
    assert found.missed and "arrival" in found.proposed[0].why
    assert found.code()[1].startswith('.key_by("key").protect(none())')
    assert (
        json.loads(json.dumps(found.to_dict(), allow_nan=False))["predicted"]["recovery_ms"] is None
    )


def test_an_unknown_life_and_one_that_is_too_long() -> None:
    (proposed,) = advice(replace(WINDOW, life_s=None)).proposed
    assert proposed.choice.name != "upstream"
    (proposed,) = advice(replace(WINDOW, life_s=1e6)).proposed
    assert proposed.choice.name != "upstream"
    assert any("would keep" in t.why for t in proposed.turned_down)


def test_state_that_was_not_looked_at_long_enough_is_noted() -> None:
    assert any("it will grow" in n for n in advice(replace(WINDOW, life_s=20.0)).notes)


def test_a_flow_without_keyed_stages() -> None:
    found = advice()
    assert found.code() == ['flow = Flow("made-up", protect=upstream())'] and not found.proposed


def test_many_stages_are_gone_through_one_by_one() -> None:
    many = [WINDOW, RUNNING] * 5
    assert COMBINATIONS_MAX < 3**5 * 2**5
    found = advice(*many, bounds=Bounds(2_000, 0.5))
    assert not found.missed
    assert {c.name for c in found.choices.values()} <= {"upstream", "passive", "pairs"}


def test_the_bytes_of_parts_and_ends_add_up() -> None:
    found = advice(WINDOW, RUNNING).to_dict()
    parts = [p["predicted"]["slowdown"] for p in found["proposed"]]
    slowdown = 1 / found["predicted"]["rate"] - 1
    assert sum(parts) < slowdown
