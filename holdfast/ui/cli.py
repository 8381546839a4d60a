"""The command line: ``holdfast run``, ``check``, ``readers``, ``advise``, ``demo``, ``bench``,
``sim``, ``paper`` and ``chaos``."""

from __future__ import annotations

import argparse
import os
import random
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from holdfast.api.graph import Flow
from holdfast.api.options import Checkpoint, Options
from holdfast.control.hosting import Place
from holdfast.errors import FlowError, HoldfastError
from holdfast.ui.report import write_json

WIDTH = 132
STOPPING = "stopping; repeat Ctrl-C or SIGTERM to give up rows that are not delivered yet"
BENCHES = ("throughput", "scaling", "failover", "protections", "sim", "ends")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Print Holdfast's own errors as one message and return exit status 2."""
    options = _parser().parse_args(argv)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # A file or a pipe has no width: tables then have up to `WIDTH` columns.
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    try:
        return int(options.command(options, console))
    except HoldfastError as error:
        print(f"holdfast: {error}", file=sys.stderr)
        return 2
    except Terminated:
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


class Terminated(KeyboardInterrupt):
    """SIGTERM was received; it stops the flow like Ctrl-C."""


@contextmanager
def _stoppable(*, by_sigterm: bool = True) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM interrupt this context. Enter it after Spark has started, because
    Spark installs a handler of Ctrl-C that cancels all jobs, and sites are jobs."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    numbers = [signal.SIGINT, *([signal.SIGTERM] if by_sigterm else [])]
    before = {number: signal.getsignal(number) for number in numbers}
    if threading.current_thread() is not threading.main_thread():
        before = {}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="holdfast", description="Continuous dataflows on a Spark cluster that keep running."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_run(commands)
    _add_check(commands)
    _add_readers(commands)
    _add_advise(commands)
    demo = commands.add_parser(
        "demo",
        help="run the network-monitoring flow, kill a site and a Spark driver, check the result",
        description="Runs the papers' network-monitoring flow in two Spark applications, kills a "
        "site and then the driver of one of them, and checks the result against the same flow as a "
        "Spark batch job. Exit status 1 if they differ.",
    )
    demo.add_argument(
        "--seconds", type=float, default=5.0, help="seconds before and after each kill (5)"
    )
    demo.add_argument("--sites", type=int, default=4, help="number of sites (4)")
    demo.set_defaults(command=_demo)
    _add_bench(commands)
    _add_sim(commands)
    _add_paper(commands)
    _add_chaos(commands)
    return parser


def _add_sim(commands: Any) -> None:
    sim = commands.add_parser(
        "sim",
        help="inject faults into a simulated cluster, and check the result",
        description="Runs flows on simulated sites in virtual time, with faults chosen by seeds, "
        "and checks after every run that the result is exact and all partitions are protected "
        "again. A failing schedule is minimised and drawn. Exit status 1 if a run fails.",
    )
    sim.add_argument("--seeds", type=int, default=200, help="number of runs (200)")
    sim.add_argument("--seed", type=int, help="the first seed (0); with --trace, the only one")
    sim.add_argument("--trace", action="store_true", help="print and draw the run of --seed")
    sim.add_argument(
        "--flow",
        choices=("dmz", "splits", "windows", "times", "timeouts", "diamond", "poison"),
        default="dmz",
    )
    protocols = ("pairs", "triples", "active", "passive", "upstream", "rollback")
    sim.add_argument("--protocol", choices=protocols, default="pairs")
    sim.add_argument(
        "--then",
        choices=protocols,
        help="change the first keyed stage to this protection during the run",
    )
    sim.add_argument(
        "--apps", type=int, default=0, help="applications (several for one run in eight)"
    )
    sim.add_argument("--bug", help="plant a bug and expect to catch it; 'list' lists the bugs")
    sim.add_argument(
        "--exhaustive", action="store_true", help="try every crash point of a small flow"
    )
    sim.add_argument("--out", default=".", help="folder for drawings of failures (.)")
    sim.set_defaults(command=_sim)


def _add_paper(commands: Any) -> None:
    paper = commands.add_parser(
        "paper",
        help="repeat a paper's simulations, with Holdfast under the same conditions",
        description="hwang05: A Comparison of Stream-Oriented High-Availability Algorithms, 2005. "
        "Prints the cost and the recovery time of passive standby, active standby and upstream "
        "backup: in the paper, in a model of it, and in Holdfast.",
    )
    paper.add_argument("name", choices=("hwang05",), help="the paper")
    paper.add_argument("--out", metavar="FOLDER", help="write the figures to FOLDER as SVG")
    paper.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    paper.add_argument("--quick", action="store_true", help="shorter and fewer runs")
    paper.set_defaults(command=_paper)


def _add_run(commands: Any) -> None:
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
        "--http",
        metavar="HOST:PORT",
        help="serve metrics, status and tables at this address; with --apps each application has "
        "its own port, from PORT on",
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
    run.set_defaults(command=_run)


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="verify a folder that --checkpoint has written",
        description="Reads all files of a folder in which a flow is stored, and reports its "
        "contents, the damage, and what to do. Exit status 1 if something is damaged, or if there "
        "is no state to resume from. Does not disturb a running flow.",
        epilog="example: holdfast check s3://bucket/calls",
    )
    check.add_argument("folder", metavar="FOLDER", help="the folder, or URL")
    check.set_defaults(command=_check)


def _check(options: argparse.Namespace, console: Console) -> int:
    from holdfast.ui.check import check_store

    report = check_store(options.folder)
    for line in report.lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0 if report.sound else 1


def _add_readers(commands: Any) -> None:
    readers = commands.add_parser(
        "readers",
        help="list the queries that read an outlet of a running flow, or forget one",
        description="Lists the readers of an outlet, each with its last committed epoch and the "
        "bytes held for it. With --forget the flow stops holding rows for a reader that will not "
        "return; if the reader does return and lacks rows that are gone, it is refused.",
        epilog="example: HOLDFAST_FLOW=holdfast://... holdfast readers alerts --forget nightly",
    )
    readers.add_argument("sink", metavar="SINK", help="the outlet's name in the flow")
    readers.add_argument(
        "--flow",
        metavar="URL",
        help="the value of run.url of the running flow (the environment variable HOLDFAST_FLOW, "
        "which hides the secret in the URL from other users of the machine)",
    )
    readers.add_argument("--forget", metavar="NAME", help="stop holding rows for this reader")
    readers.set_defaults(command=_readers)


def _add_advise(commands: Any) -> None:
    advise = commands.add_parser(
        "advise",
        help="measure a flow and propose how to protect it",
        description="Runs a flow file unprotected on plain processes for a while, with its sinks "
        "replaced by ones that only count, and predicts the cost of each protection and the delay "
        "that a loss causes, with models fitted to `holdfast bench protections`. Proposes for "
        "every stage the cheapest protection within both bounds, and lists the alternatives. Exit "
        "status 1 if no protection is within the bounds.",
        epilog="example: holdfast advise examples/dmz.py --recovery 200ms --overhead 10%",
    )
    advise.add_argument("file", metavar="FLOW.py", nargs="?", help="the file that defines the flow")
    advise.add_argument(
        "--recovery",
        metavar="TIME",
        type=_argument("duration_ms"),
        help="maximum delay of a row by a loss, counted from its detection: 200ms, 1.5s",
    )
    advise.add_argument(
        "--overhead",
        metavar="PERCENT",
        type=_argument("percentage"),
        help="maximum share of the throughput to give up: 10%%",
    )
    advise.add_argument(
        "--sites", type=int, default=4, help="number of sites that will run the flow (4)"
    )
    advise.add_argument(
        "--partitions", type=int, default=32, help="partitions of a keyed stage (32)"
    )
    advise.add_argument("--seconds", type=float, default=10.0, help="seconds to measure (10)")
    advise.add_argument(
        "--master", help="Spark master for a file that defines `flow(spark)` (an embedded one)"
    )
    advise.add_argument(
        "--fit",
        metavar="FILE",
        help="fit the models to this output of `holdfast bench protections`; without FLOW.py, "
        "print the fitted constants, and with --json write them in the shipped format",
    )
    advise.add_argument("--json", metavar="FILE", help="write the advice to FILE")
    advise.set_defaults(command=_advise)


def _argument(name: str) -> Callable[[str], float]:
    """Return a parser of `holdfast.advise.command` as an argparse type."""

    def parse(text: str) -> float:
        from holdfast.advise import command

        try:
            return float(getattr(command, name)(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="run a benchmark of Holdfast, or of Holdfast and Spark",
        description="Runs a benchmark, prints a table and optionally writes its figures as JSON. "
        "throughput: the network-monitoring flow against Structured Streaming on the same cores. "
        "scaling: cost per row as keys and partitions grow. "
        "failover: the effect of kill -9 of sites and of a Spark driver on the output, with pairs. "
        "protections: the cost of each protection, and the delay that a kill -9 causes. "
        "sim: simulated recoveries per second, and their coverage. "
        "ends: rows from Spark and Kafka into a flow and back, against Spark copying them.",
    )
    bench.add_argument("name", choices=BENCHES, help="the benchmark")
    bench.add_argument("--quick", action="store_true", help="fewer rows and repeats")
    bench.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    bench.add_argument(
        "--out",
        metavar="FOLDER",
        help="folder for the chart of `protections`, as SVG (next to FILE)",
    )
    bench.set_defaults(command=_bench)


def _sim(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.sim import command, exhaust
    from holdfast.lab.sim.bugs import BUGS

    out = Path(options.out)
    if options.bug == "list":
        for known in BUGS:
            console.print(f"{known.name}: {known.what}", highlight=False)
        return 0
    bug = command.bug_named(options.bug)
    if options.exhaustive:
        return exhaust.explore(console, bug)
    first, what = options.seed or 0, (options.flow, options.protocol, None, options.then)
    if options.trace:
        (case,) = command.cases_of(range(first, first + 1), what, bug, options.apps)
        return command.replay(case, out, console, bug)
    cases = command.cases_of(range(first, first + options.seeds), what, bug, options.apps)
    return command.explore(cases, out, console, bug)


def _paper(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.paper import hwang05

    out = Path(options.out) if options.out else None
    figures = hwang05.run(out, options.quick, console)
    if options.json:
        write_json(options.json, figures)
    return 0


def _add_chaos(commands: Any) -> None:
    chaos = commands.add_parser(
        "chaos",
        help="kill, pause and partition sites of a flow under load, and check the result",
        description="Runs a flow under load with the given protection on 4 sites. Kills and pauses "
        "its sites, breaks their connections and partitions their network at times chosen by a "
        "seed, never more than the protection promises to survive. On Spark it also kills "
        "executors. With the flow in two applications it kills drivers, and kills or pauses their "
        "ZooKeeper, which returns. Prints the effect on the output. "
        "Exit status 1 if a row is lost, repeated or wrong, if the flow fails, or if it is not "
        "protected again at the end.",
        epilog="example: holdfast chaos --faults 50 --seed 7",
    )
    long = chaos.add_mutually_exclusive_group()
    long.add_argument("--faults", type=int, help="number of faults (50)")
    long.add_argument("--minutes", type=float, help="inject faults for this time instead")
    chaos.add_argument("--seed", type=int, help="seed that chooses the faults (a random one)")
    chaos.add_argument(
        "--host",
        choices=("spark", "process"),
        default="process",
        help="where sites run: as Spark tasks, or as plain processes (process)",
    )
    chaos.add_argument(
        "--apps",
        type=int,
        choices=(1, 2),
        default=1,
        help="with 2, inject only faults of applications and their arbiter, on either host (1)",
    )
    chaos.add_argument(
        "--protection",
        choices=("pairs", "active", "passive", "upstream", "rollback"),
        default="pairs",
        help="protection of the flow (pairs)",
    )
    chaos.add_argument(
        "--flow",
        choices=("dmz", "windows"),
        help="the network-monitoring flow, or windows over event time (dmz; windows with "
        "upstream and rollback, which refuse state that depends on all rows of a key)",
    )
    chaos.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    chaos.add_argument("--verbose", action="store_true", help="print each action")
    chaos.set_defaults(command=_chaos)


def _run(options: argparse.Namespace, console: Console) -> int:
    if options.apps > 1:
        return _run_apps(options, console)
    spark = _session(options) if options.host == "spark" else None
    try:
        # SIGTERM to one of several applications only removes it; the flow continues without it.
        with _stoppable(by_sigterm=options.app is None):
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
        checkpoint=_checkpoint(options),
        restore_from=options.restore_from,
        http=options.http,
        listen=options.listen,
    )
    run = start(
        load_flow(options.file, spark),
        spark,
        options=wanted,
        place=_place(options),
        secret=_secret(options),
    )
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


def _readers(options: argparse.Namespace, console: Console) -> int:
    from rich.table import Table

    from holdfast.net.reader import forget_reader, readers_of

    url = options.flow or os.environ.get("HOLDFAST_FLOW")
    if not url:
        raise FlowError(
            "holdfast readers needs the address of the flow",
            hint="set HOLDFAST_FLOW or --flow to the value of run.url of the running flow",
        )
    if options.forget is not None:
        forget_reader(url, options.sink, options.forget)
    readers = readers_of(url, options.sink)
    table = Table("reader", "state", "epoch", "epochs behind", "bytes held", "seen s ago")
    for row in readers:
        seen = row["seen_s_ago"]
        figures = (row["epoch"], row["epochs_behind"], row["bytes_held"])
        ago = "" if seen is None else f"{seen:.1f}"
        table.add_row(row["reader"], row["state"], *(f"{n:,}" for n in figures), ago)
    console.print(table if readers else f"{options.sink!r} has no readers yet")
    return 0


def _advise(options: argparse.Namespace, console: Console) -> int:
    from holdfast.advise import command
    from holdfast.advise.propose import Bounds

    if options.file is None:
        if options.fit is None:
            raise FlowError("advise needs a FLOW.py, or --fit FILE to print its constants")
        command.refit(options.fit, options.json, console)
        return 0
    if options.recovery is None or options.overhead is None:
        raise FlowError(
            "advise needs both --recovery and --overhead",
            hint="for example --recovery 200ms --overhead 10%",
        )
    defined, spark = _flow_definition(options.file), None
    if not isinstance(defined, Flow):  # Spark pushes its rows, though its sites are processes
        options.spares = 0
        spark = _session(options)
    try:
        advice = command.advise(
            defined if isinstance(defined, Flow) else _made_flow(options.file, defined, spark),
            Bounds(options.recovery, options.overhead),
            sites=options.sites,
            partitions=options.partitions,
            seconds=options.seconds,
            fit_file=options.fit,
            json_file=options.json,
            console=console,
        )
    finally:
        if spark is not None:
            spark.stop()
    return 1 if advice.missed else 0


def _run_apps(options: argparse.Namespace, console: Console) -> int:
    """Supervise several applications on this machine."""
    if options.checkpoint or options.restore_from:
        raise FlowError("--checkpoint and --restore-from need a flow in one application")
    from holdfast.control.applications import Apps
    from holdfast.ui.live_table import watch

    apps = Apps(
        options.file,
        apps=options.apps,
        sites=options.sites,
        spares=options.spares,
        host=options.host,
        master=options.master,
        arbiter=options.arbiter,
        options=Options(partitions=options.partitions),
        http=options.http,
    )
    with _stoppable(), apps:
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


def _secret(options: argparse.Namespace) -> bytes | None:
    """Return the secret that the applications of a flow share; None with one application."""
    text = os.environ.get("HOLDFAST_SECRET", "")
    if options.app is not None and len(text) < 16:
        raise FlowError(
            "HOLDFAST_SECRET must have at least 16 characters, the same for all applications"
        )
    return text.encode() if options.app is not None else None


def _session(options: argparse.Namespace) -> Any:
    from holdfast.spark.session import local_session, session

    if options.master is None:
        return local_session("holdfast", options.sites + options.spares + 4)
    return session("holdfast", options.master)


def load_flow(path: str, spark: Any) -> Flow:
    """Return the flow that a file defines."""
    return _made_flow(path, _flow_definition(path), spark)


def _flow_definition(path: str) -> Flow | Callable[[Any], Any]:
    """Return the `flow` that a file defines: a flow, or a function that returns one."""
    if not os.path.isfile(path):
        raise FlowError(f"the file {path} does not exist")
    # Not "__main__", so that a file that starts its own flow does not do so here.
    defined = runpy.run_path(path, run_name="holdfast_flow_file").get("flow")
    if not isinstance(defined, Flow) and not callable(defined):
        raise _no_flow(path)
    return defined


def _made_flow(path: str, defined: Flow | Callable[[Any], Any], spark: Any) -> Flow:
    flow = defined if isinstance(defined, Flow) else defined(spark)
    if not isinstance(flow, Flow):
        raise _no_flow(path)
    return flow


def _no_flow(path: str) -> FlowError:
    return FlowError(
        f"{path} defines no flow",
        hint="name it `flow`, or write a function `flow(spark)` that returns it",
    )


def _demo(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.demo import demo

    return 0 if demo(options.seconds, options.sites, console) else 1


def _bench(options: argparse.Namespace, console: Console) -> int:
    import importlib

    module = importlib.import_module(f"holdfast.lab.bench.{options.name}")
    if options.out and not hasattr(module, "picture"):
        raise FlowError(f"bench {options.name} has no chart", hint="omit --out")
    figures = module.bench(quick=options.quick, console=console)
    if options.json:
        write_json(options.json, figures)
    if hasattr(module, "picture") and (options.out or options.json):
        drawn = Path(options.json or f"{options.name}.json").with_suffix(".svg")
        if options.out:
            drawn = Path(options.out) / drawn.name
        drawn.parent.mkdir(parents=True, exist_ok=True)
        drawn.write_text(module.picture(figures))
        console.print(f"wrote the chart to {drawn}", highlight=False, soft_wrap=True)
    return 0


def _chaos(options: argparse.Namespace, console: Console) -> int:
    from holdfast.lab.chaos.command import chaos

    outcome = chaos(
        count=options.faults or (None if options.minutes else 50),
        minutes=options.minutes,
        seed=random.randrange(1 << 16) if options.seed is None else options.seed,
        host=options.host,
        apps=options.apps,
        protection=options.protection,
        flow=options.flow,
        console=console,
        verbose=options.verbose,
    )
    if options.json:
        write_json(options.json, outcome.to_dict())
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
