"""A running flow over HTTP: ``/metrics`` for Prometheus, ``/status``, and ``/tables/NAME``.

`holdfast.ui.http_access` says who may read them, and `holdfast.ui.http_server` how many at once.
"""

from __future__ import annotations

import html
import itertools
import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Protocol
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pyarrow as pa
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.api.options import Http
from holdfast.core.task_phase import SAFE
from holdfast.errors import FlowError, HoldfastError
from holdfast.ui.http_access import Access
from holdfast.ui.http_server import GuardedHandler, GuardedServer

ASK_FOR_TOKEN = b"send the token: Authorization: Bearer TOKEN, or open /login?token=TOKEN\n"


class ServedFlow(Protocol):
    """A flow that can be served: a `Run`."""

    def status(self) -> dict[str, Any]: ...

    def table(self, sink: str) -> Any: ...


class MetricsCollector(Collector):
    """Collects the metrics of a flow for Prometheus."""

    def __init__(self, run: ServedFlow) -> None:
        self._run = run

    def collect(self) -> Iterable[Metric]:
        return metrics(self._run.status())


def metrics(status: dict[str, Any]) -> Iterator[Metric]:
    """Return the content of ``run.status()`` as metrics."""
    flow = [status["flow"]]
    whole = ["flow"]
    yield _one(CounterMetricFamily, "rows_in", "Rows that were put into epochs", flow, status)
    yield _one(CounterMetricFamily, "epochs", "Epochs that were cut", flow, status)
    leading = GaugeMetricFamily(
        "holdfast_leading", "Whether this application leads the flow", labels=whole
    )
    leading.add_metric(flow, status["state"] != "following")
    yield leading
    if status["partitions"]:  # unknown otherwise
        yield _one(
            GaugeMetricFamily, "protected", "Whether all replicas are up to date", flow, status
        )
    sites = GaugeMetricFamily("holdfast_sites", "Sites of the flow", labels=whole)
    sites.add_metric(flow, len(status["sites"]))
    yield sites
    gap = GaugeMetricFamily(
        "holdfast_output_gap_seconds", "The longest recent time without output", labels=whole
    )
    gap.add_metric(flow, max((s["output_gap_ms"] or 0.0 for s in status["sites"]), default=0) / 1e3)
    yield gap
    yield from _by_replicas(flow, status["partitions"])
    yield from _by_stage(flow, status["sites"])


def _one(kind: type[Any], name: str, text: str, flow: list[str], status: dict[str, Any]) -> Metric:
    metric = kind(f"holdfast_{name}", text, labels=["flow"])
    metric.add_metric(flow, float(status[name]))
    return metric


def _by_replicas(flow: list[str], partitions: list[dict[str, Any]]) -> Iterator[Metric]:
    labels = ["flow", "stage"]
    missing = GaugeMetricFamily(
        "holdfast_replicas_missing",
        "Partition groups that lack a replica",
        labels=labels,
    )
    lag = GaugeMetricFamily(
        "holdfast_lag_epochs",
        "Epochs by which the slowest replica is behind the fastest",
        labels=labels,
    )
    for stage in dict.fromkeys(p["stage"] for p in partitions):
        own = [p for p in partitions if p["stage"] == stage]
        unprotected = sum(p["phase"] not in (*SAFE, "replaying") for p in own)
        missing.add_metric([*flow, stage], unprotected)
        lag.add_metric([*flow, stage], max(p["epochs_to_go"] for p in own))
    yield missing
    yield lag


def _by_stage(flow: list[str], sites: list[dict[str, Any]]) -> Iterator[Metric]:
    labels = ["flow", "stage", "site"]
    families = {
        "rows_in": CounterMetricFamily("holdfast_stage_rows_in", "Rows processed", labels=labels),
        "rows_out": CounterMetricFamily("holdfast_stage_rows_out", "Rows emitted", labels=labels),
        "late_rows": CounterMetricFamily(
            "holdfast_stage_late_rows",
            "Rows that arrived after all of their windows had closed",
            labels=labels,
        ),
        "dead_rows": CounterMetricFamily(
            "holdfast_stage_dead_rows", "Rows that were diverted as dead letters", labels=labels
        ),
        "state_bytes": GaugeMetricFamily(
            "holdfast_state_bytes", "Size of the state", labels=labels
        ),
        "keys": GaugeMetricFamily("holdfast_state_keys", "Keys with state", labels=labels),
    }
    busy = GaugeMetricFamily(
        "holdfast_site_busy", "Part of its time that a site is not idle", labels=["flow", "site"]
    )
    for site in sites:
        busy.add_metric([*flow, str(site["site"])], site["busy"])
        for stage in dict.fromkeys(s["stage"] for s in site["stages"]):
            own = [s for s in site["stages"] if s["stage"] == stage]
            for name, family in families.items():
                family.add_metric([*flow, stage, str(site["site"])], sum(s[name] for s in own))
    yield from families.values()
    yield busy


class Web:
    """Serves one flow until it is closed; port 0 is any free one."""

    def __init__(self, run: ServedFlow, http: str | Http) -> None:
        access = Access(http)
        registry = CollectorRegistry()
        registry.register(MetricsCollector(run))
        given = {"run": run, "registry": registry, "access": access}
        handler = type("Handler", (_Handler,), given)
        try:
            self._server = GuardedServer((access.host, access.port), handler, access.tls)
        except OSError as error:
            where = f"{access.scheme}://{_shown(access.host)}:{access.port}"
            raise FlowError(f"cannot serve {where}: {error}") from error
        self.address = f"{_shown(access.host)}:{self._server.server_address[1]}"
        self.token = access.token
        """What clients must send as ``Authorization: Bearer TOKEN``; None if nothing."""
        self.url = f"{access.scheme}://{self.address}/"
        thread = threading.Thread(
            target=self._server.serve_forever, daemon=True, name="holdfast-web"
        )
        thread.start()

    @property
    def login_url(self) -> str:
        """The page for a browser. If there is a token, it is in the link: whoever has the link may
        read everything that is served."""
        return self.url if self.token is None else f"{self.url}login?token={quote(self.token)}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(GuardedHandler):
    run: ServedFlow
    registry: CollectorRegistry
    access: Access

    def answer(self) -> None:
        where = urlsplit(self.path)
        head, _, rest = where.path.strip("/").partition("/")
        if head == "login" and self.access.token is not None:
            self._login(parse_qs(where.query).get("token", [""])[0])
        elif not self.access.admits(self.headers, self._cookie):
            self._turn_away()
        else:
            self._page(head, rest, parse_qs(where.query))

    def _page(self, head: str, rest: str, query: dict[str, list[str]]) -> None:
        try:
            if not head:
                self.respond(200, "text/html; charset=utf-8", _index(self.run.status()))
            elif head == "metrics" and not rest:
                self.respond(200, "text/plain; version=0.0.4", generate_latest(self.registry))
            elif head == "status" and not rest:
                text = json.dumps(self.run.status(), default=_plain)
                self.respond(200, "application/json", text.encode())
            elif head == "tables" and rest:
                self._table(unquote(rest), query.get("key", []))
            else:
                self.respond(
                    404, "text/plain", b"the paths are /metrics, /status and /tables/NAME\n"
                )
        except HoldfastError as error:
            self.respond(404, "text/plain", f"{error}\n".encode())

    @property
    def _cookie(self) -> str:
        """The name of the cookie. Flows at several ports of a host share a browser's cookies."""
        return f"holdfast-{self.server.server_port}"

    def _login(self, token: str) -> None:
        """Exchange the token for a cookie. Its link does not stay in the browser's history."""
        if not self.access.knows(token):
            self._turn_away(b"this is not the token; the link is in what the flow printed\n")
            return
        secure = "; Secure" if self.access.tls is not None else ""
        cookie = f"{self._cookie}={self.access.cookie_value}; Path=/; HttpOnly; SameSite=Lax"
        self.respond(303, "text/plain", b"", Location="/", Set_Cookie=cookie + secure)

    def _turn_away(self, text: bytes = ASK_FOR_TOKEN) -> None:
        if self.access.token is None:
            self.respond(403, "text/plain", b"the Host header names another machine\n")
            return
        self.respond(401, "text/plain", text, WWW_Authenticate="Bearer")

    def _table(self, sink: str, key: list[str]) -> None:
        with self.run.table(sink) as table:
            if key:
                row = table.get(*map(_value, key))
                code = 200 if row is not None else 404
                self.respond(
                    code, "application/json", json.dumps(row, default=str).encode() + b"\n"
                )
                return
            batches = table.scan()
            first = next(batches, None)  # raises here, before the response, if it cannot be scanned
            self.begin_response(200, "application/x-ndjson")
            for batch in itertools.chain([first] if first else [], batches):
                self.wfile.write(_lines(batch))


def _index(status: dict[str, Any]) -> bytes:
    """The page that a browser begins with."""
    flow, state = html.escape(str(status["flow"])), html.escape(str(status["state"]))
    return (
        f"<!doctype html><title>{flow}</title><h1>{flow}</h1>"
        f"<p>{state}, {len(status['sites'])} sites, {status['rows_in']:,} rows</p>"
        '<ul><li><a href="/status">status</a><li><a href="/metrics">metrics</a></ul>'
    ).encode()


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _lines(batch: pa.RecordBatch) -> bytes:
    return "".join(json.dumps(row, default=str) + "\n" for row in batch.to_pylist()).encode()


def _value(text: str) -> Any:
    """Parse a part of a key: ``7`` is a number, ``"7"`` and ``seven`` are text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plain(value: Any) -> Any:
    return value.__dict__ if hasattr(value, "__dict__") else str(value)
