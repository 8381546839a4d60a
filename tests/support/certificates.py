"""An authority of our own, and certificates that it signs for this machine, made with openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path


class Authority:
    """Signs certificates; its own is in `cert`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.cert, self._key = folder / "ca.pem", folder / "ca.key"
        _openssl(
            *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ours"),
            *("-keyout", self._key, "-out", self.cert),
        )

    def sign(self, name: str) -> Certificate:
        """A certificate for `name`, and for the addresses of this machine."""
        key, request = self._folder / f"{name}.key", self._folder / f"{name}.csr"
        cert, extensions = self._folder / f"{name}.pem", self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName=DNS:{name},DNS:localhost,IP:127.0.0.1\n")
        _openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", key, "-out", request),
        )
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self._key, "-days", "2"),
            *("-CAcreateserial", "-extfile", extensions, "-out", cert),
        )
        return Certificate(cert, key)

    def keystore(self, of: Certificate, password: str) -> Path:
        """The certificate and its key as Java wants them."""
        store = of.cert.with_suffix(".p12")
        _openssl(
            *("pkcs12", "-export", "-in", of.cert, "-inkey", of.key, "-out", store),
            *("-passout", f"pass:{password}", "-name", "own"),
        )
        return store


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
