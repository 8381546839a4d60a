"""Who may read the pages of a flow: at which address, with which token or certificate.

A loopback address is for everybody on this machine. Any other address needs a token or client
certificates. A browser gets the token once, with a link, and then has a cookie that other sites
cannot send along and scripts cannot read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import ssl
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from holdfast.api.options import TOKEN_LENGTH_MIN, Http
from holdfast.errors import FlowError
from holdfast.net.addresses import is_loopback

LOOPBACK = "127.0.0.1"


class Access:
    """The address of a server, and what it asks of clients."""

    def __init__(self, wanted: str | Http) -> None:
        http = wanted if isinstance(wanted, Http) else Http(wanted)
        self.host, self.port = parse_address(http.address)
        self.tls = _tls(http)
        loopback = is_loopback(self.host)
        self.token = _token(http, needed=not loopback and http.client_ca is None)
        """What clients must know; None if they need not know anything."""
        self._checks_host = loopback and self.token is None

    @property
    def scheme(self) -> str:
        return "https" if self.tls is not None else "http"

    def admits(self, headers: Message, cookie: str) -> bool:
        """Whether a request with these headers may be answered. `cookie` is the cookie's name."""
        if self.token is None:
            return not self._checks_host or _names_this_machine(headers.get("Host", ""))
        kind, _, token = headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and self.knows(token.strip()):
            return True
        expected, given = self.cookie_value, _cookies(headers).get(cookie, "")
        return hmac.compare_digest(expected.encode(), given.encode("utf-8", "replace"))

    def knows(self, token: str) -> bool:
        """Whether this is the token."""
        if self.token is None:
            return False
        return hmac.compare_digest(self.token.encode(), token.encode("utf-8", "replace"))

    @property
    def cookie_value(self) -> str:
        """What stands for the token in a browser. The token cannot be found from it."""
        assert self.token is not None
        return hmac.new(self.token.encode(), b"holdfast cookie", hashlib.sha256).hexdigest()


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port.

    >>> parse_address(":9090"), parse_address("0.0.0.0:9090"), parse_address("[::1]:0")
    (('127.0.0.1', 9090), ('0.0.0.0', 9090), ('::1', 0))
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise FlowError(
            f"http={address!r} is not an address", hint="for example http='127.0.0.1:9090'"
        )
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


def _names_this_machine(header: str) -> bool:
    """Whether a request was sent to an address, or to localhost. A page on another site may give
    its own name the address of this machine, and could then read what is served here; but the
    browser sends that name along."""
    name = header.rpartition(":")[0] if header.rpartition(":")[2].isdigit() else header
    name = name.removeprefix("[").removesuffix("]")
    if name == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return False


def _cookies(headers: Message) -> dict[str, str]:
    try:
        return {name: c.value for name, c in SimpleCookie(headers.get("Cookie", "")).items()}
    except CookieError:
        return {}


def _token(http: Http, needed: bool) -> str | None:
    if http.token is not None:
        return http.token
    if http.token_file is not None:
        return _stored_token(Path(http.token_file))
    return secrets.token_urlsafe(32) if needed else None


def _stored_token(path: Path) -> str:
    """Read the token, or make one if there is no file. Of several processes that begin at once, one
    makes it and the others read it."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        if not path.exists():
            with open(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(hidden, path)
        token = path.read_text().strip()
    except OSError as error:
        raise FlowError(f"the token file {path} cannot be used: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            hidden.unlink()
    if len(token) < TOKEN_LENGTH_MIN:
        raise FlowError(
            f"the token in {path} must have at least {TOKEN_LENGTH_MIN} characters",
            hint="remove the file, and a new token is made",
        )
    return token


def _tls(http: Http) -> ssl.SSLContext | None:
    if http.cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(http.cert, http.key)
        if http.client_ca is not None:
            context.load_verify_locations(http.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(str(f) for f in (http.cert, http.key, http.client_ca) if f is not None)
        raise FlowError(f"the certificates {files} cannot be used: {error}") from error
    return context
