"""The cost models as functions: what must grow with what, and figures that can be worked out."""

import math
from dataclasses import replace

import pytest

from holdfast.advise.model import Choice, checkpoint_bytes, log_s, overall, predict, touched
from tests.support.advise_facts import CONSTANTS, RUNNING, WINDOW, flow, stage

PAIRS, UPSTREAM = Choice("pairs"), Choice("upstream")


def passive(every_ms: int) -> Choice:
    return Choice("passive", every_ms)


def test_without_keyed_stages_the_ends_only_follow() -> None:
    found = predict(flow(), {}, CONSTANTS)
    assert found.rate == 1 and found.memory_bytes == 0
    assert found.recovery_ms == CONSTANTS.route_ms + CONSTANTS.ask_ms


def test_ends_are_as_most_stages() -> None:
    assert overall({1: PAIRS, 2: UPSTREAM, 3: PAIRS}) == PAIRS
    assert overall({1: passive(500), 2: UPSTREAM, 3: passive(500)}) == passive(500)
    twice, once = (
        predict(flow(WINDOW), {1: UPSTREAM}, CONSTANTS, ends) for ends in (PAIRS, UPSTREAM)
    )
    assert twice.rate == pytest.approx(1 / (1 + 0.1 * 0.8)) and once.rate == 1
    assert predict(flow(WINDOW), {1: UPSTREAM}, CONSTANTS) == once


def test_pairs_send_and_compute_twice() -> None:
    found = predict(flow(RUNNING), {1: PAIRS}, CONSTANTS)
    assert found.extra_bytes == pytest.approx(1 / 3)  # each replica finds half of its input at home
    assert found.rate == pytest.approx(1 / (1 + 0.1 * 0.8 + 0.8 * 0.2))
    assert found.memory_bytes == RUNNING.state_bytes
    assert found.recovery_ms == CONSTANTS.route_ms
    assert predict(flow(RUNNING), {1: Choice("active")}, CONSTANTS) == found


def test_what_survives_two_losses_costs_twice_as_much_more() -> None:
    three = predict(flow(RUNNING), {1: Choice("pairs", losses=2)}, CONSTANTS)
    assert three.rate == pytest.approx(1 / (1 + 2 * (0.1 * 0.8 + 0.8 * 0.2)))
    assert three.memory_bytes == 2 * RUNNING.state_bytes
    one, two = (
        predict(flow(RUNNING), {1: Choice("passive", 500, n)}, CONSTANTS).parts[1] for n in (1, 2)
    )
    assert two.slowdown == pytest.approx(2 * one.slowdown)
    assert two.extra_bytes == pytest.approx(2 * one.extra_bytes)
    assert two.memory_bytes == one.memory_bytes + RUNNING.state_bytes


def test_on_two_sites_pairs_send_nothing() -> None:
    assert predict(flow(RUNNING, sites=2), {1: PAIRS}, CONSTANTS).extra_bytes == -1


def test_checkpoints_are_of_what_was_touched() -> None:
    facts = flow(RUNNING)
    said = {ms: checkpoint_bytes(facts, 1, {1: passive(ms)}, CONSTANTS) for ms in (10, 500, 10_000)}
    assert said[10] == pytest.approx(1.5 * 100 * 50_000, rel=0.05)  # every row touches another key
    assert said[10_000] == pytest.approx(1.5 * 1_000_000 / 10)  # all keys, every ten seconds
    assert said[10] > said[500] > said[10_000]


def test_keys_that_are_gone_are_named() -> None:
    still, busy = (flow(replace(RUNNING, removals=n)) for n in (0.0, 1_000.0))
    more = [checkpoint_bytes(f, 1, {1: passive(500)}, CONSTANTS) for f in (still, busy)]
    assert more[1] - more[0] == pytest.approx(1.5 * 16 * 1_000)


def test_output_is_in_checkpoints_if_it_may_be_asked_for_again() -> None:
    facts = flow(RUNNING, WINDOW)
    first = passive(500)
    alone = checkpoint_bytes(facts, 1, {1: first, 2: PAIRS}, CONSTANTS)
    kept = checkpoint_bytes(facts, 1, {1: first, 2: UPSTREAM}, CONSTANTS)
    covered = checkpoint_bytes(facts, 1, {1: first, 2: passive(500)}, CONSTANTS)
    assert kept - alone == pytest.approx(1e6) and covered == alone


def test_touched_is_bounded() -> None:
    for rows in (0, 1, 100, 10_000, 1e9):
        assert 0 <= touched(rows, 1_000) <= min(rows, 1_000)
    assert touched(100, 0) == 0


def test_longer_intervals_cost_less_and_take_longer() -> None:
    found = [predict(flow(RUNNING), {1: passive(ms)}, CONSTANTS) for ms in (50, 200, 1_000, 5_000)]
    assert sorted(p.rate for p in found) == [p.rate for p in found]
    assert sorted(p.recovery_ms for p in found) == [p.recovery_ms for p in found]
    assert sorted(p.memory_bytes for p in found) == [p.memory_bytes for p in found]


def test_passive_recovers_by_doing_again() -> None:
    found = predict(flow(RUNNING), {1: passive(1_000)}, CONSTANTS)
    assert found.recovery_ms == pytest.approx(2 + 30 + 3 * 1_000 * 0.2 / 4)


def test_upstream_sends_less_and_keeps_its_input() -> None:
    found = predict(flow(WINDOW), {1: UPSTREAM}, CONSTANTS)
    assert found.rate == 1 and found.extra_bytes == 0
    assert found.memory_bytes == pytest.approx(2e6)  # a second
    assert found.recovery_ms == 2 + 40  # never less than was seen
    longer = flow(replace(WINDOW, life_s=60.0))
    assert predict(longer, {1: UPSTREAM}, CONSTANTS).recovery_ms == pytest.approx(2 + 1_500)


def test_logs_reach_back_for_all_that_is_rebuilt() -> None:
    facts = flow(WINDOW, replace(WINDOW, life_s=3.0), RUNNING)
    assert log_s(facts, 1, {1: UPSTREAM, 2: UPSTREAM, 3: PAIRS}) == 4.0
    assert log_s(facts, 1, {1: UPSTREAM, 2: PAIRS, 3: PAIRS}) == 1.0
    assert log_s(facts, 1, {1: PAIRS, 2: UPSTREAM, 3: PAIRS}) == 0.0


def test_what_comes_from_everything_cannot_be_rebuilt() -> None:
    found = predict(flow(RUNNING), {1: UPSTREAM}, CONSTANTS)
    assert found.recovery_ms == math.inf and found.memory_bytes == math.inf


def test_what_is_not_protected_does_not_recover() -> None:
    facts = flow(stage("arrival", ordered=False))
    assert predict(facts, {1: Choice("none")}, CONSTANTS).recovery_ms == math.inf


def test_stages_of_a_lost_site_recover_one_after_the_other() -> None:
    facts = flow(RUNNING, RUNNING)
    one = predict(facts, {1: passive(1_000), 2: PAIRS}, CONSTANTS)
    both = predict(facts, {1: passive(1_000), 2: passive(1_000)}, CONSTANTS)
    mixed = predict(flow(WINDOW, RUNNING), {1: UPSTREAM, 2: passive(1_000)}, CONSTANTS)
    assert one.recovery_ms < both.recovery_ms < 2 * one.recovery_ms
    assert mixed.recovery_ms == pytest.approx(one.recovery_ms + 40)
