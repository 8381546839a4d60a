"""What the failover benchmark, and chaos, take for the end of a recovery."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.errors import HostError
from holdfast.lab.bench import kills


class KilledApps:
    """Of two applications the first is killed; the second has declared `dead` those it knew of."""

    leader = 0

    def __init__(self, sites: list[dict[str, Any]], dead: dict[str, str]) -> None:
        self._sites, self._dead, self.lives = sites, dead, {0: 1}
        self.processes = {0: SimpleNamespace(pid=100)}

    def ended(self, timeout: float | None = None) -> bool:
        return False

    def status(self) -> dict[str, Any]:
        killed = self.lives[0] > 1
        return {
            "sites": self._sites,
            "dead": self._dead if killed else {},
            "protected": True,
            "time": time.time() + 1,
            "view": "0.7",
        }


def killed(apps: KilledApps, monkeypatch: pytest.MonkeyPatch) -> kills.Kill:
    def kill_all(root: int) -> float:
        apps.lives[0] += 1
        return time.time()

    monkeypatch.setattr(kills, "tree", lambda root: [root, 101, 102, 103])
    monkeypatch.setattr(kills, "kill_all", kill_all)
    monkeypatch.setattr(kills, "PATIENCE_S", 0.3)
    return kills.kill_driver(apps)  # type: ignore[arg-type]


def site(number: int, pid: int, view: str = "0.7") -> dict[str, Any]:
    return {"site": number, "pid": pid, "view": view}


def test_members_that_were_killed_with_a_driver_must_be_known_to_be_dead(monkeypatch) -> None:
    sites = [site(0, 101), site(1, 102), site(2, 201)]
    assert (
        killed(KilledApps(sites, {"0": "gone", "1": "gone"}), monkeypatch).what == "application 0"
    )
    with pytest.raises(HostError, match="in vain until"):
        killed(KilledApps(sites, {"0": "gone"}), monkeypatch)


def test_a_site_that_never_had_a_view_is_not_waited_for(monkeypatch) -> None:
    """It was launched after the last commit, and died with its application: nobody knows of it."""
    sites = [site(0, 101), site(2, 201), site(9, 103, view="None")]
    assert killed(KilledApps(sites, {"0": "gone"}), monkeypatch).what == "application 0"
