"""Programs and commands in the documentation do what the pages say they do."""

from pathlib import Path

import pytest

from tests.support.pages import SERVERS, matches, name_of, pages_that_need, run_page
from tests.support.tiers import nightly

SLOW = {"howto/checkpoint.md", "howto/parquet.md", "howto/protect.md", "howto/watch.md"}
"""These run for long; other tests try what they show."""


@pytest.mark.parametrize(
    "page",
    [nightly(p) if name_of(p) in SLOW else p for p in pages_that_need(None)],
    ids=name_of,
)
def test_a_page_shows_what_its_programs_print(page: Path, tmp_path: Path) -> None:
    run_page(page, tmp_path)


def test_all_pages_with_servers_are_there() -> None:
    found = {name_of(page) for server in SERVERS.values() for page in pages_that_need(server)}
    assert found == set(SERVERS)


def test_what_differs_between_runs_is_left_out_and_nothing_else() -> None:
    assert matches("took 35 ms\nof process 7\n", "took 0.4 ms\nof process 12\n")
    assert matches("a\nb\nc\n", "a\n...\nc\n")
    assert matches("port 4711 is open\n", "port ... is open\n")
    assert not matches("35 rows\n", "36 rows\n")
    assert not matches("a\nb\n", "a\n")
    assert not matches("a\n", "a\nb\n")
