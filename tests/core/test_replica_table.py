"""The table of a replica's life: it is whole, and the documentation shows it.

``python -m tests.core.test_replica_table`` writes the page again.
"""

import re
from pathlib import Path

from holdfast.core.diagram import matrix, mermaid
from holdfast.core.replica import STALE, START, TABLE, Event, State

PAGE = Path(__file__).parents[2] / "docs" / "replicas.md"
LIVING = [s for s in State if s is not State.RETIRED]


def page() -> str:
    blocks = {
        "diagram": f"```mermaid\n{mermaid(START.values(), TABLE)}\n```",
        "matrix": matrix(LIVING, Event, TABLE, STALE),
    }
    text = PAGE.read_text()
    for name, block in blocks.items():
        shown = f"<!-- {name} -->\n{block}\n<!-- end -->"
        text = re.sub(f"<!-- {name} -->.*?<!-- end -->", lambda _, s=shown: s, text, flags=re.S)  # type: ignore[misc]
    return text


def test_the_page_shows_the_table() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.core.test_replica_table"


def test_every_state_has_a_way_in_and_a_way_out() -> None:
    reached = set(START.values())
    while more := {then for (s, _), then in TABLE.items() if s in reached} - reached:
        reached |= more
    assert reached == set(State)
    assert all(TABLE[s, Event.REMOVED] is State.RETIRED for s in LIVING)
    assert not [edge for edge in TABLE if edge[0] is State.RETIRED]


def test_nothing_is_both_an_edge_and_stale() -> None:
    assert not TABLE.keys() & STALE.keys()


def test_what_a_peer_sends_never_contradicts() -> None:
    """It may be late, or wrong; it must not stop the site."""
    outcomes = [e for e in Event if e.name.startswith("STATE_COMPLETE")]
    for state in LIVING:
        assert (state, Event.STATE_OFFERED) in TABLE.keys() | STALE.keys()
        if state not in (State.INSTALLING, State.STANDBY):
            assert all((state, e) in STALE for e in outcomes)
    assert all((State.INSTALLING, e) in TABLE for e in outcomes)


if __name__ == "__main__":
    PAGE.write_text(page())
