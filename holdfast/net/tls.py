"""Certificates of sites and controls, and the contexts of Python's ``ssl`` that use them.

Unless the user has an authority, a flow makes its own. Its key is derived from the flow's secret,
so all applications sign for the same authority without talking to each other. A certificate names
its holder's role and number, and a site's is sent to it with the code.

Pushers and readers have no certificate of their own, but the authority's, and prove who they are by
their keys. The proofs of the handshake include a digest of the server's certificate
(`holdfast.net.handshake`): who stands between the two has another one, and cannot make the proof.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from holdfast.api.security import Tls
from holdfast.errors import HostError
from holdfast.net.wire import AGENT, PULSE, SERVER, SITE

_NAMES = {SITE: "site", PULSE: "site", AGENT: "control", SERVER: "control"}
"""What a role is called in a certificate."""
_BEGIN = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)
"""The certificates of a flow are good for as long as its secret is: a flow runs for years."""


@dataclass(frozen=True)
class Certificate:
    """A certificate with its key, and the authority that others' must be of; PEM."""

    ca: bytes
    cert: bytes
    key: bytes
    of_flow: bool
    """Whether the authority is the flow's own, whose certificates name roles."""

    @classmethod
    def read(cls, files: Tls) -> Certificate:
        """The user's own, from files of this machine."""
        try:
            parts = [Path(path).read_bytes() for path in (files.ca, files.cert, files.key)]
        except OSError as error:
            raise HostError(
                f"cannot read a certificate: {error}",
                hint="Tls(ca=, cert=, key=) are paths on every machine that has a site",
            ) from error
        return cls(parts[0], parts[1], parts[2], of_flow=False)

    def without_key(self) -> Certificate:
        """For a client: what it checks others' certificates by."""
        return replace(self, cert=b"", key=b"")

    @property
    def digest(self) -> bytes:
        """What proofs include of a server's certificate."""
        return digest_of(ssl.PEM_cert_to_DER_cert(_first(self.cert)))


@lru_cache(maxsize=8)
def context(certificate: Certificate | None, server: bool) -> ssl.SSLContext:
    """A server asks for a certificate; which peers must have one, the handshake decides. A client
    that was not given an authority checks the server by the handshake's proofs alone."""
    made = _context(server)
    if certificate is None:
        return made
    try:
        made.load_verify_locations(cadata=certificate.ca.decode())
        if certificate.key:
            with _as_file(certificate.cert) as cert, _as_file(certificate.key) as key:
                made.load_cert_chain(cert, key)
    except (ssl.SSLError, ValueError) as error:
        raise HostError(f"a certificate cannot be used: {error}") from error
    made.verify_mode = ssl.CERT_OPTIONAL if server else ssl.CERT_REQUIRED
    return made


def digest_of(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()


def holder_of(certificate: dict[str, Any]) -> str:
    """Who holds a certificate of the flow's authority, for example "site:3"; empty if it does not
    say."""
    for kind, value in certificate.get("subjectAltName", ()):
        if kind == "URI" and value.startswith("holdfast:"):
            return str(value).removeprefix("holdfast:")
    return ""


def may_be(holder: str, role: str, id_: int) -> bool:
    """Whether the holder of a certificate may have this role. A negative number is any.

    >>> may_be("site:3", "pulse", 3), may_be("site:3", "server", -1), may_be("site:3", "site", 4)
    (True, False, False)
    """
    name, _, number = holder.partition(":")
    return _NAMES.get(role) == name and (id_ < 0 or number == str(id_))


def needs_certificate(role: str) -> bool:
    return role in _NAMES


class CertificateAuthority:
    """The authority of a flow, from a key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(key)

    @cached_property
    def _pem(self) -> bytes:
        return self._signed(self._name, self._key.public_key(), ca=True)

    @cached_property
    def _name(self) -> str:
        """While a secret is rotated two authorities are trusted, which are found by their names."""
        public = self._key.public_key().public_bytes_raw()
        return f"authority {digest_of(public).hex()[:16]}"

    def certify(
        self, name: str, number: int, trusted: Sequence[CertificateAuthority] = ()
    ) -> Certificate:
        """A certificate for "site" or "control" of this number, with a new key. Its holder trusts
        the other authorities as well."""
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        own = Ed25519PrivateKey.generate()
        pem = own.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        cert = self._signed(f"{name}:{number}", own.public_key(), ca=False)
        ca = b"".join(authority._pem for authority in trusted or (self,))
        return Certificate(ca, cert, pem, of_flow=True)

    def _signed(self, name: str, public: Any, ca: bool) -> bytes:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        def named(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"holdfast {text}")])

        uri = x509.UniformResourceIdentifier(f"holdfast:{name}")
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named(self._name))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_BEGIN)
            .not_valid_after(_END)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), True)
            .add_extension(x509.SubjectAlternativeName([uri]), False)
        )
        return builder.sign(self._key, None).public_bytes(serialization.Encoding.PEM)


def _context(server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if not server:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.num_tickets = 0
    return context


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """``ssl`` loads keys from files only. This one exists in memory alone."""
    descriptor = os.memfd_create("holdfast", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _first(pem: bytes) -> str:
    """The holder's certificate is the first of a chain."""
    end = "-----END CERTIFICATE-----"
    text = pem.decode()
    begin = text.find("-----BEGIN CERTIFICATE-----")
    return text[begin : text.find(end, begin) + len(end)] + "\n"
