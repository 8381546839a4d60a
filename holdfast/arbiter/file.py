"""An arbiter in a directory, for several applications on one host.

Each version is a file. A party writes it under a temporary name and then links it to the name of
its version number. The link is the compare-and-set: the kernel lets only one party create a name.
There is no lock, so a party that is paused or killed at any point blocks no other.

Old versions are removed, so a party that was paused for long may link a number that is free
*again*. `_append` therefore lists the directory after linking: a version is removed only when later
ones exist, and the latest is never removed, so a link counts only if no later version exists. This
requires the listing to be a snapshot. It is: a few dozen names fit into one system call, during
which Linux blocks new links.

A renewal replaces one small file per term, which only the leader of that term writes. Times are
CLOCK_BOOTTIME, which all processes of a host share and which advances during suspend. They mean
nothing on another host, so records of another host are refused. Records of an earlier boot count,
but their leases do not: the holders died with that boot.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from holdfast.arbiter import pack, unpack
from holdfast.arbiter.leased import LeasedArbiter, VersionRecord
from holdfast.core.ids import Entry
from holdfast.errors import ArbiterAway, HostError

KEPT = 16
"""Versions kept, so that a reader can open the version that it has just listed."""


_REMOVED = "%removed-"
"""Begins the names of directories that are being removed. No flow's directory has it."""


class FileArbiter(LeasedArbiter):
    """An arbiter whose files are in the directory ``path/flow``."""

    def __init__(self, path: str, flow: str, lease_s: float) -> None:
        super().__init__(flow, lease_s)
        self.directory = Path(path) / quote(flow, safe="")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError as error:
            raise HostError(
                f"flow {flow!r}: cannot create an arbiter in {path!r}: {error}",
                hint="a file arbiter needs Linux and a writable local directory",
            ) from error
        self._host = f"{socket.gethostname()} {_machine_id()}"

    def _clock_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def _latest(self) -> VersionRecord:
        with self._reached():
            while True:
                version = self._latest_version()
                if version == 0:
                    return VersionRecord()
                with contextlib.suppress(FileNotFoundError):  # removed: later versions exist
                    return self._decode(version, self._version_file(version).read_bytes())

    def _append(self, record: VersionRecord) -> bool:
        entry = record.entry
        with self._reached():
            temporary = self._write(
                f"{entry.version:012d}",
                pack(
                    entry.value,
                    term=entry.term,
                    holder=entry.holder,
                    until_ns=record.until_ns,
                    boot=self._boot,
                    host=self._host,
                ),
            )
            try:
                os.link(temporary, self._version_file(entry.version))
            except (FileExistsError, FileNotFoundError):
                return False  # another party won, perhaps long ago: it removes temporary files
            finally:
                temporary.unlink(missing_ok=True)
            _fsync(self.directory)
            if self._latest_version() != entry.version:
                return False
        self._remove_older(entry)
        return True

    def _until_ns(self, record: VersionRecord) -> int:
        with self._reached(), contextlib.suppress(FileNotFoundError):
            # `until_ns` is 0 for a record of an earlier boot, whose lease does not count.
            return int(self._lease_file(record.entry.term).read_bytes()) if record.until_ns else 0
        return record.until_ns

    def _extend(self, term: int, until_ns: int) -> None:
        with self._reached():
            temporary = self._write(f"lease-{term:012d}", str(until_ns).encode(), durable=False)
            os.replace(temporary, self._lease_file(term))

    def names(self) -> list[str]:
        with self._reached():
            return [unquote(n) for n in os.listdir(self.directory.parent) if _REMOVED not in n]

    @property
    def removed(self) -> bool:
        return self.directory.parent.exists() and not self.directory.exists()

    def _remove(self) -> None:
        with self._reached():
            gone = self.directory.with_name(f"{_REMOVED}{uuid.uuid4().hex}")
            self.directory.rename(gone)  # at once: nobody sees half of the files
            for left in self.directory.parent.glob(f"{_REMOVED}*"):
                shutil.rmtree(left, ignore_errors=True)

    def _decode(self, version: int, data: bytes) -> VersionRecord:
        header, value = unpack(data)
        if header["boot"] != self._boot and header["host"] != self._host:
            raise HostError(
                f"flow {self.flow!r}: the arbiter in {self.directory} belongs to another host: "
                f"{header['host'].split()[0]}",
                hint="a file arbiter serves one host: use zk://host:port for several hosts, "
                "or remove the directory if no flow uses it",
            )
        until_ns = header["until_ns"] if header["boot"] == self._boot else 0
        return VersionRecord(Entry(version, header["term"], header["holder"], value), until_ns)

    def _version_file(self, version: int) -> Path:
        return self.directory / f"version-{version:012d}"

    def _lease_file(self, term: int) -> Path:
        return self.directory / f"lease-{term:012d}"

    def _latest_version(self) -> int:
        names = os.listdir(self.directory)
        return max((int(n[8:]) for n in names if n.startswith("version-")), default=0)

    def _write(self, name: str, data: bytes, *, durable: bool = True) -> Path:
        temporary = self.directory / f"temporary-{name}-{uuid.uuid4().hex}"
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            if durable:  # a lease ends with the host, so it need not wait for a busy disk
                os.fsync(file.fileno())
        return temporary

    def _remove_older(self, entry: Entry) -> None:
        """Remove old versions and leases, and temporary files of dead parties: these belong to a
        version or term that has ended."""
        ended = {"version-": entry.version - KEPT, "temporary-": entry.version}
        ended |= {"lease-": entry.term - 1, "temporary-lease-": entry.term - 1}
        with contextlib.suppress(OSError):
            for name in os.listdir(self.directory):
                parts = re.match(r"([a-z-]+)(\d+)", name)
                if parts and int(parts[2]) <= ended.get(parts[1], 0):
                    (self.directory / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ArbiterAway(where=str(self.directory), cause=str(error)) from error


def _machine_id() -> str:
    with contextlib.suppress(OSError):
        return Path("/etc/machine-id").read_text().strip()
    return "-"


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
