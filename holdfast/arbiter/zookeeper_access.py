"""How an arbiter gets into ZooKeeper, and who else may read or change its entry.

The URL says where the files are, so that no password is in a command line or an error::

    zk://host:port,host:port?auth_file=PATH&scheme=sasl&ca=PATH&cert=PATH&key=PATH&acl=creator

`auth_file` holds ``user:password``; without it the environment variable HOLDFAST_ZOOKEEPER_AUTH may
hold the same. `scheme` is "digest", where the client sends the password and the server believes
any, or "sasl", where the server knows the users and the client proves the password by DIGEST-MD5.
`ca` turns TLS on; `cert` and `key` are this client's own. With credentials or a certificate of its
own, the client creates entries that only they can read and change; `acl` may say otherwise.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from holdfast.errors import FlowError, HostError

AUTH = "HOLDFAST_ZOOKEEPER_AUTH"
CREATOR, OPEN = "creator", "open"
DIGEST, SASL = "digest", "sasl"
_FILES = ("ca", "cert", "key")


@dataclass(frozen=True)
class ZooKeeperAccess:
    """The part of the URL behind the hosts, checked."""

    auth: str | None = field(default=None, repr=False)
    """``user:password``."""
    scheme: str = DIGEST
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    acl: str = OPEN
    """`CREATOR`, `OPEN`, or ``scheme:id:permissions`` with commas between several."""

    @classmethod
    def parse(cls, query: str) -> ZooKeeperAccess:
        """
        >>> ZooKeeperAccess.parse("acl=open")
        ZooKeeperAccess(scheme='digest', ca=None, cert=None, key=None, acl='open')
        """
        given = dict(parse_qsl(query, keep_blank_values=True))
        unknown = given.keys() - {*_FILES, "auth_file", "scheme", "acl"}
        if unknown:
            raise FlowError(
                f"the arbiter's URL has unknown settings: {', '.join(sorted(unknown))}",
                hint="there are auth_file, scheme, ca, cert, key and acl",
            )
        files = {name: _readable(given[name]) for name in _FILES if name in given}
        if "ca" not in files and files:
            raise FlowError("the arbiter's URL has cert or key, but no ca: that turns TLS on")
        auth = _auth(given.get("auth_file"))
        scheme = _scheme(given.get("scheme", DIGEST), auth)
        default = CREATOR if auth is not None or "cert" in files else OPEN
        return cls(auth=auth, scheme=scheme, acl=given.get("acl", default), **files)

    def client_settings(self) -> dict[str, Any]:
        """The arguments of kazoo's client."""
        settings: dict[str, Any] = {}
        if self.auth is not None and self.scheme == SASL:
            user, _, password = self.auth.partition(":")
            own = {"mechanism": "DIGEST-MD5", "username": user, "password": password}
            settings["sasl_options"] = own
        elif self.auth is not None:
            settings["auth_data"] = [(DIGEST, self.auth)]
        if self.ca is not None:
            settings |= {"use_ssl": True, "verify_certs": True, "check_hostname": True}
            settings |= {"ca": self.ca, "certfile": self.cert, "keyfile": self.key or self.cert}
        return settings

    def acls(self) -> list[Any]:
        """The permissions of an entry, for kazoo."""
        from kazoo import security

        if self.acl == OPEN:
            return security.OPEN_ACL_UNSAFE
        if self.acl == CREATOR:
            return security.CREATOR_ALL_ACL
        return [_parsed(part) for part in self.acl.split(",")]

    def root_acls(self) -> list[Any]:
        """The permissions of ``/holdfast``, in which flows of other users are, too. A flow there
        that is not empty cannot be deleted, and only its own user can empty it."""
        from kazoo import security

        if self.acl == OPEN:
            return security.OPEN_ACL_UNSAFE
        return [security.make_acl("world", "anyone", read=True, create=True, delete=True)]

    def fits(self, found: list[Any]) -> bool:
        """Whether an entry with these permissions is as safe as one that this client makes."""
        if self.acl == OPEN:
            return True
        if self.acl == CREATOR:  # the server puts the creator's name in place of "creator"
            return all(one.id.scheme != "world" for one in found)
        return set(found) == set(self.acls())


def _parsed(text: str) -> Any:
    """One of a list: ``digest:user:hash:cdrwa``, or ``world:anyone:r``."""
    from kazoo import security

    scheme, _, rest = text.partition(":")
    identity, _, letters = rest.rpartition(":")
    if not scheme or not identity or not letters or set(letters) - set("crwda"):
        raise FlowError(
            f"the arbiter's URL: acl={text!r} is no permission",
            hint="use creator, open, or scheme:id:permissions, such as digest:user:hash:cdrwa",
        )
    words = {"c": "create", "r": "read", "w": "write", "d": "delete", "a": "admin"}
    return security.make_acl(scheme, identity, **{words[letter]: True for letter in letters})


def _auth(file: str | None) -> str | None:
    if file is None:
        auth = os.environ.get(AUTH) or None
    else:
        with open(_readable(file)) as opened:
            auth = opened.read().strip()
    if auth is not None and not all(auth.partition(":")):
        raise FlowError(f"ZooKeeper's credentials in {file or AUTH} are not user:password")
    return auth


def _scheme(scheme: str, auth: str | None) -> str:
    if scheme not in (DIGEST, SASL):
        raise FlowError(f"the arbiter's URL: scheme={scheme}: there are {DIGEST} and {SASL}")
    if scheme == SASL and auth is None:
        raise FlowError(
            f"the arbiter's URL has scheme={SASL}, and no credentials",
            hint=f"add auth_file=PATH, or set {AUTH}",
        )
    if scheme == SASL and importlib.util.find_spec("puresasl") is None:
        raise HostError(
            f"scheme={SASL} of an arbiter requires the package pure-sasl, which is not installed",
            hint="pip install 'holdfast[zookeeper-sasl]'",
        )
    return scheme


def _readable(path: str) -> str:
    try:
        with open(path, "rb"):
            return path
    except OSError as error:
        raise FlowError(f"the arbiter's URL names {path}, which cannot be read: {error}") from error
