"""``holdfast run``: runs a flow file, in one application or in several."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.api.options import Checkpoint, Http, Options
from holdfast.api.security import Level, Security, Tls
from holdfast.control.hosting import Place
from holdfast.control.run import Run
from holdfast.errors import FlowError, HoldfastError
from holdfast.net.keys import check_length
from holdfast.ui.flow_file import load_flow, session_of
from holdfast.ui.report import write_json
from holdfast.ui.signals import stoppable

log = logging.getLogger("holdfast.run")

STOPPING = "stopping; repeat Ctrl-C or SIGTERM to give up rows that are not delivered yet"


def add_to(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a flow file",
        description="Runs a Python file that defines `flow` (a holdfast.Flow), or a function "
        "`flow(spark)` that returns one. The same file can go to spark-submit if it starts the "
        "flow itself under `if __name__ == '__main__'`. SIGTERM and Ctrl-C stop the flow: it takes "
        "no more rows, delivers the rows that it has taken, and with --checkpoint writes its "
        "state. A second signal ends it immediately.",
        epilog="example: holdfast run examples/dmz.py --sites 4 --master 'local[8]'",
    )
    run.add_argument("file", metavar="FLOW.py", help="the file that defines the flow")
    run.add_argument("--sites", type=int, default=2, help="number of sites (2)")
    run.add_argument("--spares", type=int, default=0, help="number of spare sites (0)")
    run.add_argument("--partitions", type=int, default=32, help="partitions of a keyed stage (32)")
    run.add_argument(
        "--balance",
        choices=("auto", "manual", "off"),
        default="manual",
        help="who moves partitions between sites: the flow, run.move, or nobody (manual)",
    )
    run.add_argument(
        "--groups-per-site",
        type=int,
        default=1,
        metavar="N",
        help="number of partition groups of a keyed stage for each site: what can be moved (1)",
    )
    run.add_argument(
        "--host",
        choices=("spark", "process"),
        default="spark",
        help="where sites run: as Spark tasks, or as plain processes on this machine (spark)",
    )
    run.add_argument(
        "--master", help="Spark master to connect to (an embedded one, large enough for the sites)"
    )
    run.add_argument(
        "--apps",
        type=int,
        default=1,
        help="number of applications that host the flow, so that it survives the loss of one (1)",
    )
    run.add_argument(
        "--arbiter",
        metavar="URL",
        help="arbiter that decides which application leads: file:/path, or zk://host:port,...",
    )
    run.add_argument("--app", type=int, help="number of this application in --controls, from 0")
    run.add_argument(
        "--controls",
        metavar="HOST:PORT,...",
        help="addresses of the applications' controllers; all need the same HOLDFAST_SECRET",
    )
    run.add_argument("--seconds", type=float, help="stop after this time (when the sources end)")
    run.add_argument("--listen", help="address on which controller and sites listen")
    run.add_argument(
        "--security",
        choices=[level.value for level in Level],
        help="protection of connections: auth if all addresses are loopback, else tls",
    )
    run.add_argument(
        "--tls-ca",
        metavar="FILE",
        help="the authority of your own certificates for connections (PEM), at the same path on "
        "all machines, with --tls-cert and --tls-key",
    )
    run.add_argument("--tls-cert", metavar="FILE", help="the certificate of sites and controllers")
    run.add_argument("--tls-key", metavar="FILE", help="the key of --tls-cert")
    run.add_argument(
        "--secret-file",
        metavar="FILE",
        help="the secret that applications share, instead of HOLDFAST_SECRET; on SIGHUP it is "
        "read again, and replaces the flow's secret while it runs",
    )
    run.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="serve metrics, status and tables at this address, :PORT for this machine only; "
        "other addresses than loopback ask for a token, HOLDFAST_HTTP_TOKEN, that of "
        "--http-token-file, or a new one that is printed; with --apps each application has its "
        "own port, from PORT on",
    )
    run.add_argument(
        "--http-token-file",
        metavar="FILE",
        help="the token for --http; it is made if there is no such file",
    )
    run.add_argument("--http-cert", metavar="FILE", help="serve --http over TLS (PEM)")
    run.add_argument("--http-key", metavar="FILE", help="the key of --http-cert (PEM)")
    run.add_argument(
        "--http-client-ca",
        metavar="FILE",
        help="ask the clients of --http for a certificate of this authority (PEM)",
    )
    run.add_argument(
        "--checkpoint",
        metavar="PATH",
        help="write the state to this folder when the flow is stopped",
    )
    run.add_argument(
        "--checkpoint-interval",
        metavar="SECONDS",
        type=float,
        help="also write the state at this interval, so that a flow that is lost can be resumed",
    )
    run.add_argument(
        "--restore-from",
        metavar="PATH",
        help="continue from the state that --checkpoint wrote, and write it there again, as before",
    )
    run.add_argument("--quiet", action="store_true", help="no live table")
    run.add_argument("--json", metavar="FILE", help="write the final status to FILE")
    run.set_defaults(command=execute)


def execute(options: argparse.Namespace, console: Console) -> int:
    if options.apps > 1:
        return _run_apps(options, console)
    on_spark = options.host == "spark"
    spark = session_of(options.master, options.sites + options.spares) if on_spark else None
    try:
        # SIGTERM to one of several applications only removes it; the flow continues without it.
        with stoppable(by_sigterm=options.app is None):
            _run_here(options, console, spark)
    finally:
        if spark is not None:
            spark.stop()
    return 0


def _run_here(options: argparse.Namespace, console: Console, spark: Any) -> None:
    from holdfast.control.run import start
    from holdfast.ui.live_table import watch

    wanted = Options(
        sites=options.sites,
        spares=options.spares,
        partitions=options.partitions,
        balance=options.balance,
        groups_per_site=options.groups_per_site,
        checkpoint=_checkpoint(options),
        restore_from=options.restore_from,
        http=_http(options),
        listen=options.listen,
        security=_security(options),
    )
    run = start(
        load_flow(options.file, spark),
        spark,
        options=wanted,
        place=_place(options),
        secret=_secret(options),
    )
    if options.secret_file is not None:
        _rotate_on_hangup(options.secret_file, run)
    if run.web is not None and run.web.token is not None:
        _print_login(options, console, run.web.login_url)
    if options.restore_from and run.options.store is not None:
        every_s = run.options.store_every_ms / 1e3
        often = f"every {every_s:g} s, and " if every_s else ""
        console.print(
            f"resuming from {options.restore_from}; storing at {run.options.store} {often}"
            "when stopped",
            highlight=False,
            soft_wrap=True,
        )
    with run:
        try:
            if options.quiet:
                run.ended(options.seconds)
            else:
                until = time.monotonic() + (options.seconds or float("inf"))
                watch(run, console, lambda: time.monotonic() >= until)
        except KeyboardInterrupt:
            if options.app is not None:
                raise
            console.print(STOPPING)
            run.stop(timeout=None)
    run.wait()
    if options.json:
        write_json(options.json, run.status())


def _run_apps(options: argparse.Namespace, console: Console) -> int:
    """Supervise several applications on this machine."""
    if options.checkpoint or options.restore_from:
        raise FlowError("--checkpoint and --restore-from need a flow in one application")
    from holdfast.control.applications import Apps
    from holdfast.ui.http_access import Access
    from holdfast.ui.live_table import watch

    http = _http(options)
    if http is not None and (token := Access(http).token) is not None:
        http = replace(http, token=token, token_file=None)  # the same for all applications
        _print_login(options, console, f"{http.address}, Authorization: Bearer {token}")
    apps = Apps(
        options.file,
        apps=options.apps,
        sites=options.sites,
        spares=options.spares,
        host=options.host,
        master=options.master,
        arbiter=options.arbiter,
        options=Options(
            partitions=options.partitions,
            balance=options.balance,
            groups_per_site=options.groups_per_site,
            security=_security(options),
        ),
        http=http,
    )
    with stoppable(), apps:
        until = time.monotonic() + (options.seconds or float("inf"))
        try:
            while not apps.status()["sites"] and not apps.ended(0.2):
                pass
            if options.quiet:
                apps.ended(options.seconds)
            else:
                watch(apps, console, lambda: time.monotonic() >= until)
        except KeyboardInterrupt:
            console.print(STOPPING)
        if not apps.ended(0):
            apps.stop(timeout=None)
        apps.wait()
        if options.json:
            write_json(options.json, apps.status())
    return 0


def _http(options: argparse.Namespace) -> Http | None:
    files = (options.http_token_file, options.http_cert, options.http_key, options.http_client_ca)
    if options.http is None:
        if any(file is not None for file in files):
            raise FlowError(
                "--http-token-file, --http-cert, --http-key and --http-client-ca need "
                "--http, an address"
            )
        return None
    token = None if options.http_token_file else os.environ.get("HOLDFAST_HTTP_TOKEN")
    return Http(options.http, token or None, *files)


def _print_login(options: argparse.Namespace, console: Console, login: str) -> None:
    """Print how to get in, if nobody can know that yet."""
    if options.http_token_file is not None:
        login = f"the token is in {options.http_token_file}"
    elif os.environ.get("HOLDFAST_HTTP_TOKEN"):
        login = "the token is HOLDFAST_HTTP_TOKEN"
    console.print(f"pages: {login}", highlight=False, soft_wrap=True, markup=False)


def _checkpoint(options: argparse.Namespace) -> Checkpoint | None:
    path, interval = options.checkpoint or options.restore_from, options.checkpoint_interval
    if interval is not None and interval <= 0:
        raise FlowError(f"--checkpoint-interval {interval}: the interval must be positive")
    if interval is not None and path is None:
        raise FlowError("--checkpoint-interval needs --checkpoint, a folder to write to")
    if options.checkpoint is None and interval is None:
        return None
    return Checkpoint(path, interval=interval)


def _place(options: argparse.Namespace) -> Place | None:
    if options.app is None and options.controls is None:
        return None
    if options.app is None or options.controls is None or options.arbiter is None:
        raise FlowError("--app, --controls and --arbiter must be used together")
    try:
        pairs = [text.rsplit(":", 1) for text in options.controls.split(",")]
        controls = tuple((host, int(port)) for host, port in pairs)
    except ValueError:
        raise FlowError(f"--controls {options.controls}: not HOST:PORT,HOST:PORT") from None
    if not 0 <= options.app < len(controls):
        raise FlowError(f"--app {options.app}: --controls names {len(controls)} applications")
    return Place(options.app, controls, options.arbiter)


def _security(options: argparse.Namespace) -> Security | None:
    files = (options.tls_ca, options.tls_cert, options.tls_key)
    if not any(files):
        return str(options.security) if options.security is not None else None
    if not all(files) or options.security not in (None, Level.TLS.value):
        raise FlowError("--tls-ca, --tls-cert and --tls-key are used together, for --security tls")
    return Tls(*(os.path.abspath(path) for path in files))


def _secret(options: argparse.Namespace) -> bytes | None:
    """Return the secret that the applications of a flow share; None with one application that was
    not given any."""
    if options.secret_file is not None:
        text = _secret_in(options.secret_file)
    elif options.app is not None:
        text = os.environ.get("HOLDFAST_SECRET", "")
    else:
        return None
    try:
        check_length(text)
    except FlowError as error:
        raise FlowError(
            f"HOLDFAST_SECRET or --secret-file: {error.message}", hint=error.hint
        ) from None
    return text.encode()


def _secret_in(file: str) -> str:
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FlowError(f"--secret-file {file}: {error}") from error


def _rotate_on_hangup(file: str, run: Run) -> None:
    """On SIGHUP replace the flow's secret by the one in the file. The file gets the new secret in
    the form that names the start of the flow, for applications that join later."""

    def rotate() -> None:
        try:
            secret = run.rotate_secret(_secret_in(file))
            Path(file).write_text(secret + "\n")
            log.warning("the flow's secret is now that of %s", file)
        except HoldfastError as error:
            log.error("the secret was not replaced: %s", error)

    signal.signal(signal.SIGHUP, lambda *_: threading.Thread(target=rotate, daemon=True).start())
