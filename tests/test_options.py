"""How a flow is run: what is asked for is what is done, wherever it is asked for."""

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from holdfast import Checkpoint, Flow, FlowError, Options, sinks, sources
from holdfast import functions as F
from holdfast.engine.durations import milliseconds, seconds

HALF = datetime.timedelta(milliseconds=500)


def totals() -> Flow:
    flow = Flow("totals")
    batch = pa.record_batch({"shop": [1, 2, 1], "eur": [5, 7, 9]})
    sales = flow.source("sales", sources.rows(batch))
    sales.key_by("shop").agg(total=F.sum("eur")).sink("totals", sinks.discard())
    return flow


def test_what_options_say_is_what_is_done(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    wanted = Options(sites=1, partitions=8, checkpoint=Checkpoint(store, interval=0.7))
    with totals().start(options=wanted) as run:
        assert run.options.partitions == 8 and len(run.status()["domains"]) == 1
        assert (run.options.store, run.options.store_every_ms) == (store, 700)
        assert run.wait(60)


def test_everyday_settings_can_be_given_to_start_beside_others(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path / "store", interval=HALF)
    beside = Options(lease=HALF, partitions=4)
    with totals().start(
        sites=1, partitions=4, checkpoint=checkpoint, http="127.0.0.1:0", options=beside
    ) as run:
        assert run.options.partitions == 4 and run.options.lease_s == 0.5
        assert run.options.store == str(tmp_path / "store") and run.options.store_every_ms == 500
        assert run.web is not None
        assert run.wait(datetime.timedelta(seconds=60))


@pytest.mark.parametrize(
    "name, one, other",
    [
        ("sites", 2, 1),
        ("spares", 0, 1),
        ("partitions", 32, 4),
        ("checkpoint", Checkpoint("here"), Checkpoint("here", interval=1)),
        ("restore_from", "here", "there"),
        ("http", "127.0.0.1:0", "0.0.0.0:0"),
    ],
)
def test_a_setting_in_two_places_is_refused_if_they_differ(name: str, one: Any, other: Any) -> None:
    """Also if one of them is what the default would be."""
    for inside, beside in ((one, other), (other, one)):
        with pytest.raises(FlowError) as caught:
            totals().start(options=Options(**{name: inside}), **{name: beside})
        text = str(caught.value)
        assert f"start({name}={beside!r})" in text
        assert f"options=Options({name}={inside!r})" in text and "hint: " in text


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"partitions": 0}, "partitions must be between 1 and 65,535, not 0"),
        ({"sites": 0}, "sites must be at least 1"),
        ({"lease": 0}, "lease=0: it must be positive"),
        ({"lease": -1.0}, "lease=-1.0: a duration is not negative"),
        ({"lease": "1s"}, "lease='1s' is not a duration"),
        ({"lease": True}, "lease=True is not a duration"),
        ({"call_timeout": datetime.timedelta(0)}, "call_timeout"),
        ({"idle": -1}, "idle=-1: a duration is not negative"),
        ({"status_interval": 0}, "status_interval=0"),
        ({"checkpoint": "folder"}, "checkpoint='folder' is not a Checkpoint"),
        ({"read_ahead_rows": 1}, "read_ahead_rows=1 is less than block_rows=65536"),
        ({"window": 0}, "window must be positive, not 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_values_are_refused_by_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(FlowError) as caught:
        Options(**settings)
    assert text in str(caught.value)


def test_a_checkpoint_needs_a_place_and_no_interval_of_nothing() -> None:
    with pytest.raises(FlowError, match="the path is a folder"):
        Checkpoint("")
    with pytest.raises(FlowError, match=r"Checkpoint\(interval\)=0"):
        Checkpoint("here", interval=0)
    with pytest.raises(TypeError, match="partitons"):
        Options(partitons=8)  # type: ignore[call-arg]


def test_durations_are_seconds_or_timedelta() -> None:
    assert seconds(HALF, "x") == seconds(0.5, "x") == 0.5
    assert milliseconds(HALF, "x") == milliseconds(0.5, "x") == 500
    assert milliseconds(0.0001, "x") == 1, "never is not what was asked for"
