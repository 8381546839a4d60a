"""A flow over HTTP: what Prometheus reads, and what is in a table."""

import json
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast import Flow, FlowError
from holdfast import functions as F
from holdfast.control.run import Run
from holdfast.protections import pairs
from holdfast.sinks import table
from holdfast.sources import generator
from holdfast.ui.web import Web
from tests.support.lines import SCHEMA, numbers
from tests.support.runs import until_protected, until_rows


def get(run: Run, path: str) -> tuple[int, str]:
    assert run.web is not None
    try:
        with urllib.request.urlopen(f"http://{run.web.address}{path}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def metrics(run: Run) -> dict[str, list[tuple[dict[str, str], float]]]:
    families = text_string_to_metric_families(get(run, "/metrics")[1])
    samples = [s for family in families for s in family.samples]
    return {s.name: [(o.labels, o.value) for o in samples if o.name == s.name] for s in samples}


@pytest.fixture
def run(kept: list[Run]) -> Run:
    flow = Flow("seen", protect=pairs(failure_domain="process"))
    source = flow.source("numbers", generator(numbers, SCHEMA, rate=20_000))
    source.key_by("k").agg(t=F.sum("v"), n=F.count()).sink("latest", table("k"))
    kept.append(flow.start(sites=3, partitions=6, http="127.0.0.1:0"))
    until_protected(kept[0], 3)
    until_rows(kept[0])
    return kept[0]


def test_metrics_say_what_the_status_says(run: Run) -> None:
    said = metrics(run)
    flow = {"flow": "seen"}
    assert said["holdfast_sites"] == [(flow, 3.0)] and said["holdfast_protected"] == [(flow, 1.0)]
    assert 0 < said["holdfast_rows_in_total"][0][1] <= run.status()["rows_in"]
    assert 0 < said["holdfast_epochs_total"][0][1] <= run.status()["epochs"]
    stages = {stage["stage"] for site in run.status()["sites"] for stage in site["stages"]}
    assert {labels["stage"] for labels, _ in said["holdfast_stage_rows_in_total"]} == stages
    assert all(value == 0 for _, value in said["holdfast_replicas_missing"])
    assert sum(value for _, value in said["holdfast_state_bytes"]) > 0
    assert said["holdfast_output_gap_seconds"][0][1] > 0
    assert said["holdfast_lag_epochs"]


def test_views_and_the_status_are_there_for_all(run: Run) -> None:
    code, text = get(run, "/tables/latest")
    rows = [json.loads(line) for line in text.splitlines()]
    assert code == 200 and rows and set(rows[0]) == {"k", "t", "n"}
    code, text = get(run, f"/tables/latest?key={rows[0]['k']}")
    assert code == 200 and json.loads(text)["k"] == rows[0]["k"]
    assert json.loads(get(run, "/status")[1])["flow"] == "seen"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/other", "the paths are /metrics"),
        ("/tables/other", "has no sink 'other'"),
        ("/tables/latest?key=-1", "null"),
        ("/tables/latest?key=x", "must have the columns k: int64"),
    ],
)
def test_what_is_not_there_is_said(run: Run, path: str, said: str) -> None:
    code, text = get(run, path)
    assert code == 404 and said in text


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(FlowError, match="is not an address"):
        Web(None, "9090")  # type: ignore[arg-type]
