"""An object store that speaks S3 (moto's server), on a free port of the loopback."""

import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from holdfast.control.applications import free_ports

START_S_MAX = 60.0
KEYS = {"AWS_ACCESS_KEY_ID": "holdfast", "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests"}


class Server:
    """One process, with one bucket."""

    def __init__(self, directory: Path) -> None:
        (self.port,) = free_ports(1)
        self._said = directory / "said"
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, path: str) -> str:
        """Of a folder, as pyarrow wants it."""
        more = f"scheme=http&endpoint_override=127.0.0.1:{self.port}&region=us-east-1"
        return f"s3://bucket/{path}?{more}"

    def requests(self) -> list[str]:
        """The requests so far, as the server logs them: method and path."""
        lines = self._said.read_text(errors="replace").splitlines()
        return [line.split('"')[1].strip() for line in lines if 'HTTP/1.1"' in line]

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [Path(sys.prefix, "bin", "moto_server"), "-H", "127.0.0.1", "-p", str(self.port)]
        with open(self._said, "wb") as said:
            self._process = subprocess.Popen(command, stdout=said, stderr=said)
        deadline = time.monotonic() + START_S_MAX
        while not self._makes_the_bucket():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise OSError(self._said.read_text(errors="replace")[-2_000:])
            time.sleep(0.1)

    def _makes_the_bucket(self) -> bool:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/bucket", method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=10):
                return True
        except OSError:
            return False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
