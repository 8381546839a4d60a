"""A PostgreSQL server and a Kafka broker whose clients need TLS and a certificate."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from holdfast.control.applications import free_ports
from holdfast.lab.chaos.kafka import Broker
from tests.support.certificates import Authority, Certificate
from tests.support.postgres_server import PostgresServer

PASSWORD = "changeit"


class SecurePostgres(PostgresServer):
    """Lets the user ``app`` in over TLS alone, with a certificate of the authority."""

    def __init__(self, authority: Authority) -> None:
        super().__init__()
        own = authority.sign("postgres")
        files = {"ssl_cert_file": own.cert, "ssl_key_file": own.key, "ssl_ca_file": authority.cert}
        settings = ["ssl=on"]
        for name, path in files.items():
            copy = self._home / path.name
            shutil.copy(path, copy)
            copy.chmod(0o600)
            if os.geteuid() == 0:
                shutil.chown(copy, "postgres", "postgres")
            settings.append(f"{name}='{copy}'")
        with open(self._data / "postgresql.conf", "a") as config:
            config.write("\n".join(settings) + "\n")
        (self._data / "pg_hba.conf").write_text(
            "hostssl all app 127.0.0.1/32 trust clientcert=verify-ca\n"
            "host all postgres 127.0.0.1/32 trust\n"
        )

    def secure_dsn(self, ca: Path, client: Certificate) -> str:
        files = f"sslrootcert={ca} sslcert={client.cert} sslkey={client.key}"
        return f"host=127.0.0.1 port={self.port} user=app dbname=app sslmode=verify-full {files}"


class SecureBroker(Broker):
    """Has a listener with TLS beside its plain one."""

    def __init__(self, directory: Path, authority: Authority) -> None:
        super().__init__(directory)
        (self.secure_port,) = free_ports(1)
        config = self._config.read_text().splitlines()
        settings = dict(line.split("=", 1) for line in config if "=" in line)
        settings["listeners"] += f",SSL://127.0.0.1:{self.secure_port}"
        settings["listener.security.protocol.map"] += ",SSL:SSL"
        settings |= {
            "ssl.keystore.type": "PKCS12",
            "ssl.keystore.location": str(authority.keystore(authority.sign("kafka"), PASSWORD)),
            "ssl.keystore.password": PASSWORD,
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(authority.cert),
            "ssl.client.auth": "required",
        }
        self._config.write_text("".join(f"{k}={v}\n" for k, v in settings.items()))

    def secure_options(self, ca: Path, client: Certificate) -> dict[str, str]:
        return {
            "security.protocol": "SSL",
            "ssl.ca.location": str(ca),
            "ssl.certificate.location": str(client.cert),
            "ssl.key.location": str(client.key),
        }
