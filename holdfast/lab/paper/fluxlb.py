"""``holdfast paper fluxlb``: the load-balancing experiments of the Flux thesis, chapter 4.

32 machines are simulated (`holdfast.lab.paper.fluxlb_sim`). Who decides what moves is either the
thesis' rules to the letter, or `holdfast.core.balance`, the code that runs on Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from holdfast.core.balance import BalanceParams, BalancePolicy
from holdfast.lab.paper import fluxlb_report as report
from holdfast.lab.paper.figures import Table, show_table
from holdfast.lab.paper.fluxlb_policy import HoldfastBalancer, ThesisBalancer
from holdfast.lab.paper.fluxlb_sim import (
    LOADED,
    RATE,
    SITES,
    Balancer,
    SkewedCluster,
    SkewSetting,
    SkewTrace,
)

MB = 1e6
GROUPS = 16_384
UNLOADED = RATE * SITES
Made = Callable[[], Balancer | None]


@dataclass(frozen=True, slots=True)
class FluxlbEffort:
    """How long experiments run, in simulated seconds, and which places of each sweep are taken."""

    buffers: tuple[int, ...] = (0, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192)
    rotation_s: int = 16
    trace_s: int = 25
    loaded: tuple[int, ...] = (0, 1, 4, 8, 16, 24, 32)
    skew_s: int = 60
    collect_ms: tuple[int, ...] = (10, 50, 100, 250, 500, 1_000)
    memory_trace_s: int = 50
    pressed: tuple[int, ...] = (1, 4, 8, 12, 16, 20)
    memory_s: int = 100
    mixed_s: int = 100


FULL = FluxlbEffort()
QUICK = FluxlbEffort(
    (0, 64, 256, 1_024, 8_192), 8, 14, (1, 8, 32), 8, (10, 100, 1_000), 24, (1, 16), 40, 40
)


# --- conditions -----------------------------------------------------------------------------------

CPU, MEMORY, HYBRID = BalancePolicy.CPU, BalancePolicy.MEMORY, BalancePolicy.HYBRID
LARGE = SkewSetting(partitions=128, state_bytes=6 * MB, slice_s=0.02)
"""The setting of section 4.5: 768 MB of state on each machine of 1 GB."""


TIGHT = BalanceParams(imbalance_min=1.06, settled=1.03, receiver_max=0.97)
"""Chosen on figures 4.6 and 4.7; `docs/papers.md` has what the defaults give."""


def static() -> Balancer | None:
    return None


def thesis(policy: BalancePolicy = CPU, collect_ms: float = 10, as_printed: bool = False) -> Made:
    return lambda: ThesisBalancer(policy, collect_ms / 1e3, as_printed=as_printed)


def holdfast(policy: BalancePolicy = CPU, collect_ms: float = 250) -> Made:
    params = replace(TIGHT, policy=policy, collect_ms_min=collect_ms)
    return lambda: HoldfastBalancer(params)


BY_CPU: dict[str, Made] = {
    "static": static,
    "thesis' rules": thesis(),
    "Holdfast": holdfast(),
}
BY_COLLECTION: dict[str, Callable[[float], Made]] = {
    "formula as printed": lambda ms: thesis(CPU, ms, as_printed=True),
    "thesis' rules": lambda ms: thesis(CPU, ms),
    "Holdfast": lambda ms: holdfast(CPU, ms),
}
BY_MEMORY: dict[str, Made] = {
    "static": static,
    "thesis' rules": thesis(MEMORY),
    "Holdfast": holdfast(HYBRID, 500),
}


def chosen(count: int, first: int | None = None) -> list[int]:
    """Machines at random, beginning with a certain one."""
    some = [int(s) for s in np.random.default_rng(5).permutation(SITES)]
    if first is not None:
        some = [first, *(s for s in some if s != first)]
    return some[:count]


def skewed(count: int) -> list[float]:
    """By partition: how often its keys come, if 20 % of the keys come in 80 % of the tuples, of
    those 20 % again in 80 %, and so on, and keys are hashed to partitions."""
    power = np.log(0.8) / np.log(0.2)
    each = np.diff((np.arange(GROUPS + 1) / GROUPS) ** power)
    partition = np.random.default_rng(3).integers(0, count, GROUPS)
    return [float(w) for w in np.bincount(partition, each, count)]


def loaded_run(setting: SkewSetting, made: Made, sites: Sequence[int], seconds: float) -> SkewTrace:
    """External load on some machines from the start, with full buffers."""
    cluster = SkewedCluster(setting, made())
    cluster.warm_up()
    cluster.speed[list(sites)] = LOADED
    return cluster.run(seconds)


def pressed_run(made: Made, memory: dict[int, float], seconds: float, loaded: bool) -> SkewTrace:
    """Less memory on some machines from the start, and external load on them if wanted."""
    cluster = SkewedCluster(LARGE, made())
    cluster.warm_up()
    for site, left in memory.items():
        cluster.press(site, left)
        if loaded:
            cluster.speed[site] = LOADED
    return cluster.run(seconds)


# --- experiments ----------------------------------------------------------------------------------


def rotating_load(effort: FluxlbEffort) -> list[Table]:
    """Figure 4.2."""

    def rotate(cluster: SkewedCluster) -> None:
        cluster.speed[:] = 1.0
        cluster.speed[int(cluster.now / 0.5) % SITES] = LOADED

    def rate(buffer: int, divided: bool) -> float:
        setting = SkewSetting(1, 0.0, buffer, divided or not buffer, slice_s=0.001)
        cluster = SkewedCluster(setting)
        if not setting.divided:
            cluster.warm_up()
        return cluster.run(effort.rotation_s, rotate).rate(0) / 1e3

    found = {
        "shared buffer": [rate(b, False) for b in effort.buffers],
        "divided buffer": [rate(b, True) for b in effort.buffers],
        "unloaded": [UNLOADED / 1e3] * len(effort.buffers),
    }
    return [report.rotation(effort.buffers, found)]


def one_loaded(effort: FluxlbEffort) -> list[Table]:
    """Figure 4.6."""

    def load(cluster: SkewedCluster) -> None:
        cluster.speed[5] = LOADED if cluster.now >= 1.0 else 1.0

    traces = {
        name: SkewedCluster(SkewSetting(), made()).run(effort.trace_s, load)
        for name, made in BY_CPU.items()
    }
    traces["unloaded"] = SkewedCluster(SkewSetting()).run(effort.trace_s)
    return [report.one_loaded(traces)]


def many_loaded(effort: FluxlbEffort) -> list[Table]:
    """Figure 4.7."""

    def rate(made: Made, count: int) -> float:
        sites = chosen(count)

        def load(cluster: SkewedCluster) -> None:
            cluster.speed[sites] = LOADED if cluster.now >= 1.0 else 1.0

        return SkewedCluster(SkewSetting(), made()).run(effort.trace_s + 5, load).rate(-5) / 1e3

    found = {name: [rate(made, n) for n in effort.loaded] for name, made in BY_CPU.items()}
    lost = (1.0 - LOADED) / SITES
    found["ideal"] = [UNLOADED / 1e3 * (1.0 - lost * n) for n in effort.loaded]
    return [report.many_loaded(effort.loaded, found)]


def collection_time(effort: FluxlbEffort) -> list[Table]:
    """Figure 4.8."""
    setting = SkewSetting(weights=skewed(64 * SITES))
    popular = int(np.argmax(setting.weights or ())) % SITES
    tables = []
    for loaded in (0, 8):
        sites = chosen(loaded, popular)
        found: dict[str, list[float | None]] = {}
        for name, made in BY_COLLECTION.items():
            found[name] = [
                # Rounds of Holdfast's policy that are this short take too long to simulate.
                None
                if name == "Holdfast" and ms < 100
                else loaded_run(setting, made(ms), sites, effort.skew_s).rate(0) / 1e3
                for ms in effort.collect_ms
            ]
        still = loaded_run(setting, static, sites, effort.skew_s).rate(0) / 1e3
        found["static"] = [still] * len(effort.collect_ms)
        tables.append(report.collection_time(effort.collect_ms, loaded, found))
    return tables


def one_pressed(effort: FluxlbEffort) -> list[Table]:
    """Figures 4.10 and 4.11."""

    def press(cluster: SkewedCluster) -> None:
        if cluster.now >= 1.0 and cluster.memory[5] > 512 * MB:
            cluster.press(5, 512 * MB)

    traces = {
        name: SkewedCluster(LARGE, made()).run(effort.memory_trace_s, press)
        for name, made in BY_MEMORY.items()
    }
    return report.one_pressed(traces)


def many_pressed(effort: FluxlbEffort) -> list[Table]:
    """Figures 4.12 and 4.13."""
    found = {
        name: [
            pressed_run(made, dict.fromkeys(chosen(n), 512 * MB), effort.memory_s, loaded=False)
            for n in effort.pressed
        ]
        for name, made in BY_MEMORY.items()
    }
    return report.many_pressed(effort.pressed, found)


def mixed(effort: FluxlbEffort, memory: dict[int, float]) -> dict[str, dict[str, SkewTrace]]:
    """By policy, by whose rules: external load and less memory on these machines."""
    still = pressed_run(static, memory, effort.mixed_s, loaded=True)
    found = {"static": {"thesis": still, "Holdfast": still}}
    for policy in (MEMORY, CPU, HYBRID):
        found[policy.value] = {
            name: pressed_run(made, memory, effort.mixed_s, loaded=True)
            for name, made in (
                ("thesis", thesis(policy)),
                ("Holdfast", holdfast(policy, 500)),
            )
        }
    return found


def medium_mix(effort: FluxlbEffort) -> list[Table]:
    """Figure 4.14."""
    return report.medium_mix(mixed(effort, dict.fromkeys(chosen(8), 512 * MB)))


def heavy_mix(effort: FluxlbEffort) -> list[Table]:
    """Figure 4.15."""
    half = {s: (512 if s < SITES // 2 else 762) * MB for s in range(SITES)}
    return report.heavy_mix(mixed(effort, half))


EXPERIMENTS: dict[str, Callable[[FluxlbEffort], list[Table]]] = {
    "4.2": rotating_load,
    "4.6": one_loaded,
    "4.7": many_loaded,
    "4.8": collection_time,
    "4.10 and 4.11": one_pressed,
    "4.12 and 4.13": many_pressed,
    "4.14": medium_mix,
    "4.15": heavy_mix,
}


def run(out: Path | None, quick: bool, console: Console) -> dict[str, Any]:
    """Print the figures as tables, draw them into the folder `out` if it is given, and return
    them."""
    effort = QUICK if quick else FULL
    tables: list[Table] = []
    for name, experiment in EXPERIMENTS.items():
        with console.status(f"simulating figure {name}"):
            made = experiment(effort)
        for table in made:
            show_table(report.shortened(table), console)
        tables += made
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for table in tables:
            (out / f"fluxlb-{table.key}.svg").write_text(report.drawing(table))
        console.print(f"{len(tables)} figures are in {out}", highlight=False)
    return {"paper": "fluxlb", "quick": quick, "tables": {t.key: t.to_dict() for t in tables}}
