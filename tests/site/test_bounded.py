"""What the parts of a site, of a host and of a store keep does not grow with every death."""

import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.hosts.processes import ProcessHost
from holdfast.net import wire
from holdfast.site.config import SiteConfig
from holdfast.site.peers import DEAD_MAX, Peers
from holdfast.storage.files import SYNCED_MAX, Folder
from tests.support.growth import grown, sizes
from tests.support.runs import until


class Line:
    """A connection of another site, which notes what becomes of it."""

    role = wire.SITE

    def __init__(self, site: int) -> None:
        self.id = site
        self.sent: list[Any] = []
        self.closed = False

    def send(self, message: wire.Message) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True

    abort = close


def ignore(*_: Any) -> None: ...


def replaced(peers: Peers, first: int, last: int) -> None:
    """Members die one after the other, and each is replaced by the next number."""
    for site in range(first, last):
        known, view = (SimpleNamespace(members=(0, s)) for s in (site, site + 1))
        peers.on_view(view, known, {site + 1: ("host", site + 1)})  # type: ignore[arg-type]


def test_a_site_does_not_remember_all_dead_sites() -> None:
    peers = Peers(0, b"s", ignore, ignore, ignore, ignore)
    replaced(peers, 1, 1 + DEAD_MAX)
    before = sizes({"peers": peers})
    replaced(peers, 1 + DEAD_MAX, 5 * DEAD_MAX)
    assert grown(before, sizes({"peers": peers})) == {}


def test_a_dead_site_that_is_not_remembered_is_refused_and_not_fenced() -> None:
    """It may be a spare with a low number that is about to join."""
    peers = Peers(0, b"s", ignore, ignore, ignore, ignore)
    replaced(peers, 5, 5 + 2 * DEAD_MAX)
    last = 4 + 2 * DEAD_MAX
    recent, early, spare, new = (Line(site) for site in (last, 5, 3, last + 50))
    for line in (recent, early, spare, new):
        peers.accept(line, 7)  # type: ignore[arg-type]
    assert recent.sent == [wire.Fenced(7)] and recent.closed
    assert not early.sent and early.closed and not spare.sent and spare.closed
    assert not new.closed, "its view is on its way here"
    members = SimpleNamespace(members=(0, 3))
    peers.on_view(members, members, {3: ("host", 3)})  # type: ignore[arg-type]
    again = Line(3)
    peers.accept(again, 7)  # type: ignore[arg-type]
    assert not again.closed


def test_a_folder_does_not_remember_all_that_it_has_synced(tmp_path: Path) -> None:
    folder, batch = Folder(str(tmp_path)), pa.record_batch({"x": [1]})
    for number in range(SYNCED_MAX + 20):
        folder.write(f"checkpoints/{number}/a.arrow", [batch], sync=True)
    assert len(folder._synced) == SYNCED_MAX


class Fleeting(ProcessHost):
    """Its sites end at once."""

    def work(self, flow: Flow, config: SiteConfig) -> Any:
        return partial(time.sleep, 0)


def test_a_host_forgets_processes_that_have_ended() -> None:
    host, exits = Fleeting(), []
    for site in range(5):
        config = SiteConfig(site, b"secret", (("127.0.0.1", 1),), "127.0.0.1", Options())
        host.launch(Flow("f"), config, lambda site, reason: exits.append(site))
    until(lambda: len(exits) == 5, "all processes have ended")
    assert host._processes == {}
    host.close()
