"""ZooKeeper servers with a port for TLS, at which clients need certificates, and with SASL."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

from holdfast.lab.chaos.zookeeper import JAR, MAIN, ZooKeeperServer
from tests.support.certificates import Authority

NETTY = ":".join(str(p) for p in JAR.parent.glob("netty-*.jar"))
PASSWORD = "changeit"


class SecureZooKeeper(ZooKeeperServer):
    """Its plain port only says that it runs."""

    def __init__(self, directory: Path, authority: Authority) -> None:
        super().__init__(directory)
        self._authority = authority
        self._keystore = authority.keystore(authority.sign("zookeeper"), PASSWORD)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.secure_port = probe.getsockname()[1]
        with open(self._config, "a") as config:
            config.write(f"secureClientPort={self.secure_port}\n")
            config.write("secureClientPortAddress=127.0.0.1\n")

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = {
            "forceSync": "no",
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "ssl.keyStore.location": self._keystore,
            "ssl.keyStore.password": PASSWORD,
            "ssl.keyStore.type": "PKCS12",
            "ssl.trustStore.location": self._authority.cert,
            "ssl.trustStore.type": "PEM",
        }
        given = [f"-Dzookeeper.{name}={value}" for name, value in settings.items()]
        return subprocess.Popen(
            ["java", "-Xmx128m", *given, "-cp", f"{JAR}:{NETTY}", MAIN, self._config],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


class SaslZooKeeper(ZooKeeperServer):
    """Knows users by SASL, with DIGEST-MD5."""

    def __init__(self, directory: Path, users: dict[str, str]) -> None:
        super().__init__(directory)
        module = "org.apache.zookeeper.server.auth.DigestLoginModule"
        known = "\n".join(f'user_{name}="{password}"' for name, password in users.items())
        self._logins = directory / "jaas.conf"
        self._logins.write_text(f"Server {{ {module} required\n{known}; }};\n")
        with open(self._config, "a") as config:
            provider = "org.apache.zookeeper.server.auth.SASLAuthenticationProvider"
            config.write(f"authProvider.1={provider}\n")

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = ["-Dzookeeper.forceSync=no", f"-Djava.security.auth.login.config={self._logins}"]
        return subprocess.Popen(
            ["java", "-Xmx128m", *settings, "-cp", JAR, MAIN, self._config],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
