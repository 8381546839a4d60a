"""Who may read a flow's pages, and that slow, large and many requests do no harm."""

import contextlib
import http.client
import logging
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import FlowError, Http
from holdfast.control.applications import http_of
from holdfast.ui import http_server
from holdfast.ui.http_access import Access
from holdfast.ui.web import Web
from tests.support.certificates import Authority

TOKEN = "a token of some length"


class Flow:
    """What a page shows. No flow runs."""

    def status(self) -> dict[str, Any]:
        counts = {"rows_in": 7, "epochs": 1}
        return {"flow": "<seen>", "state": "running", "sites": [], "partitions": [], **counts}

    def table(self, sink: str) -> Any:
        raise NotImplementedError


@contextlib.contextmanager
def served(wanted: str | Http) -> Iterator[Web]:
    web = Web(Flow(), wanted)
    try:
        yield web
    finally:
        web.close()


def ask(web: Web, path: str = "/status", /, **headers: str) -> int:
    return answer(web, path, **headers).status


def answer(web: Web, path: str, /, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", int(web.address.rpartition(":")[2]))
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def test_a_port_alone_is_for_this_machine() -> None:
    """It was for everybody."""
    with served(":0") as web:
        assert web.address.startswith("127.0.0.1:") and web.token is None
        assert ask(web) == 200


def test_another_address_needs_a_token_and_has_one_made() -> None:
    with served("0.0.0.0:0") as web, served("0.0.0.0:0") as other:
        assert web.token is not None and len(web.token) > 40 and web.token != other.token
        for path in ("/", "/status", "/metrics", "/tables/x", "/nothing"):
            assert ask(web, path) == 401
        assert ask(web, Authorization=f"Bearer {other.token}") == 401
        assert ask(web, Authorization=f"Basic {web.token}") == 401
        assert ask(web, Authorization=f"Bearer {web.token}") == 200
        assert ask(web, "/metrics", Authorization=f"Bearer {web.token}") == 200


def test_a_token_that_is_given_is_asked_for_at_a_loopback_address_too() -> None:
    with served(Http(":0", token=TOKEN)) as web:
        assert ask(web) == 401 and ask(web, Authorization=f"Bearer {TOKEN}") == 200
        assert ask(web, Authorization=f"Bearer {TOKEN}x") == 401
    assert TOKEN not in repr(Http(":0", token=TOKEN))


def test_a_link_gives_a_browser_a_cookie_in_place_of_the_token() -> None:
    with served(Http(":0", token=TOKEN)) as web, served(Http(":0", token=TOKEN[::-1])) as other:
        wrong = answer(web, "/login?token=wrong")
        assert wrong.getheader("Set-Cookie") is None and b"not the token" in wrong.read()
        assert b"send the token" in answer(web, "/").read()
        login = answer(web, web.login_url.removeprefix(web.url.rstrip("/")))
        cookie = login.getheader("Set-Cookie") or ""
        assert login.status == 303 and login.getheader("Location") == "/"
        assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and TOKEN not in cookie
        named = cookie.partition(";")[0]
        page = answer(web, "/", Cookie=named)
        assert page.status == 200 and "&lt;seen&gt;" in page.read().decode()
        assert ask(web, Cookie=named[:-1]) == 401
        value = named.partition("=")[2]
        port = other.address.rpartition(":")[2]
        assert ask(other, Cookie=f"holdfast-{port}={value}") == 401


def test_a_page_of_another_site_cannot_read_what_is_served_to_this_machine() -> None:
    """Its name may stand for 127.0.0.1, but the browser sends the name."""
    with served(":0") as web:
        assert ask(web, Host="evil.example:9090") == 403
        assert ask(web, Host="localhost:9090") == 200 and ask(web, Host="[::1]") == 200


def test_a_token_file_is_made_once_and_for_the_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "token"
    tokens: list[str | None] = []
    start = threading.Barrier(4)

    def begin() -> None:
        start.wait()
        tokens.append(Access(Http(":0", token_file=file)).token)

    threads = [threading.Thread(target=begin) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(tokens)) == 1 and tokens[0] == file.read_text().strip()
    assert file.stat().st_mode & 0o777 == 0o600 and [p.name for p in tmp_path.iterdir()] == [
        "token"
    ]
    file.write_text("short")
    with pytest.raises(FlowError, match="at least 16 characters"):
        Access(Http(":0", token_file=file))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"token": "short"}, "at least 16"),
        ({"token": TOKEN, "token_file": "x"}, "one of them"),
        ({"client_ca": "ca.pem"}, "need cert="),
    ],
)
def test_settings_that_protect_nothing_are_refused(wrong: dict[str, str], said: str) -> None:
    with pytest.raises(FlowError, match=said):
        Http(":0", **wrong)  # type: ignore[arg-type]


def test_certificates_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(FlowError, match=r"missing\.pem cannot be used"):
        Access(Http(":0", cert=tmp_path / "missing.pem"))


def test_every_application_asks_for_the_same_token() -> None:
    second = http_of(Http("0.0.0.0:9090", token=TOKEN), 1)
    assert second == Http("0.0.0.0:9091", token=TOKEN)


def test_a_client_certificate_stands_for_a_token(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path / "ours"), Authority(tmp_path / "others")
    own, client, stranger = ours.sign("localhost"), ours.sign("client"), others.sign("client")
    wanted = Http("0.0.0.0:0", cert=own.cert, key=own.key, client_ca=ours.cert)
    with served(wanted) as web:
        assert web.token is None and web.url.startswith("https://")
        url = f"https://localhost:{web.address.rpartition(':')[2]}/status"
        for shown, welcome in ((client, True), (stranger, False), (None, False)):
            context = ssl.create_default_context(cafile=str(ours.cert))
            if shown is not None:
                context.load_cert_chain(shown.cert, shown.key)
            if welcome:
                with urllib.request.urlopen(url, timeout=10, context=context) as found:
                    assert found.status == 200
            else:
                with pytest.raises(OSError):
                    urllib.request.urlopen(url, timeout=10, context=context).read()


# --- clients that mean no good --------------------------------------------------------------------


def connect(web: Web) -> socket.socket:
    host, _, port = web.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def test_silent_connections_do_not_keep_others_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with served(":0") as web, contextlib.ExitStack() as held:
        silent = [held.enter_context(connect(web)) for _ in range(4 * http_server.WAITING_MAX)]
        assert ask(web) == 200
        assert silent[0].recv(1) == b""
        assert len(web._server._visits) <= http_server.WAITING_MAX
        assert len(caplog.records) < 5


def test_a_request_that_trickles_in_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 1.0)
    with served(":0") as web, connect(web) as slow:
        slow.sendall(b"GET /status HTTP/1.0\r\n")
        slow.settimeout(0.1)
        got = b"?"
        while got == b"?":
            with contextlib.suppress(TimeoutError):
                got = slow.recv(1)
            with contextlib.suppress(OSError):
                slow.sendall(b"X: y\r\n")
        assert got == b""
        deadline = time.monotonic() + 20
        while web._server._visits:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("large", ["path", "headers"])
def test_a_request_that_is_too_large_is_refused(large: str) -> None:
    rubbish = b"x" * (2 * http_server.REQUEST_BYTES_MAX)
    path, header = (rubbish, b"") if large == "path" else (b"", b"X: " + rubbish)
    with served(":0") as web, connect(web) as greedy:
        with contextlib.suppress(OSError):
            greedy.sendall(b"GET /" + path + b" HTTP/1.0\r\n" + header + b"\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            got = b"".join(iter(lambda: greedy.recv(4096), b""))
            assert not got or b"431" in got
        assert ask(web) == 200
