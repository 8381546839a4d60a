"""What a site says to those who control it."""

import socket
from dataclasses import dataclass, field, replace

import pytest

from holdfast.core.ids import SiteId
from holdfast.core.layout import PartitionGroup, View
from holdfast.errors import OperatorError
from holdfast.net import wire
from holdfast.site.runtime import Site
from tests.support.lonely_site import lonely_site


def view(term: int, number: int) -> View:
    one = (PartitionGroup(0, 1, (SiteId(0),)),)
    return View(term, number, (SiteId(0),), (one, one))


def test_a_failure_is_said_again_to_a_new_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that led may have died before it heard of it; nothing would ever end the flow."""
    site, said = lonely_site(), []
    monkeypatch.setattr(site, "tell", said.append)
    monkeypatch.setattr(site, "_kick", lambda: None)
    site.on_new_view(None, wire.NewView(view(0, 0), {}))
    error = OperatorError(flow="f", stage="s", operator="o", epoch=1, row="r", cause="c")
    site._fail(error)
    assert [type(m) for m in said if isinstance(m, wire.Failed)] == [wire.Failed]
    said.clear()
    site.on_new_view(None, wire.NewView(view(0, 1), {}))
    assert not [m for m in said if isinstance(m, wire.Failed)]
    site.on_new_view(None, wire.NewView(view(1, 2), {}))
    (again,) = [m for m in said if isinstance(m, wire.Failed)]
    assert again.detail["cause"] == "c"


@dataclass
class ToController:
    """A connection that remembers what was said."""

    local_host: str
    said: list[wire.Message] = field(default_factory=list)

    def send(self, message: wire.Message) -> None:
        self.said.append(message)


def registered(site: Site, local_host: str) -> wire.Register:
    connection, site._port = ToController(local_host), 9
    site._register(connection)  # type: ignore[arg-type]
    (message,) = connection.said
    assert isinstance(message, wire.Register)
    return message


def test_a_site_is_where_its_controller_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is no help: on many machines it stands for an address that only they can use."""
    site = lonely_site()
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    site.config = replace(site.config, listen_host="0.0.0.0")
    assert registered(site, "10.0.0.7").host == "10.0.0.7"
    assert registered(site, "127.0.0.1").host == "127.0.1.1"
    site.config = replace(site.config, listen_host="10.0.0.9")
    assert registered(site, "10.0.0.7").host == "10.0.0.9"


def test_a_site_in_a_container_can_be_told_what_machine_it_is_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = lonely_site()
    alone = registered(site, "127.0.0.1").domain
    assert alone.host == socket.gethostname()
    monkeypatch.setenv("HOLDFAST_HOST", "node-7")
    assert registered(site, "127.0.0.1").domain == replace(alone, host="node-7")
