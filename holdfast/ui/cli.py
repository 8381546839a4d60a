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
STOPPING = "stopping; once more (Ctrl-C, SIGTERM) gives up what was taken"
BENCHES = ("throughput", "scaling", "failover", "protections", "sim", "ends")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and turn Holdfast's own errors into one readable message and exit status 2."""
    options = _parser().parse_args(argv)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # A file or a pipe has no width: tables are then as wide as they want to be, within reason.
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
    """SIGTERM: to be stopped, as by Ctrl-C."""


@contextmanager
def _stoppable(*, by_sigterm: bool = True) -> Iterator[None]:
    """Both Ctrl-C and SIGTERM interrupt what is done here. To be entered when Spark has started:
    its own handler of Ctrl-C cancels all jobs, and sites are jobs."""

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
        "--seconds", type=float, default=5.0, help="how long it runs before and after each kill (5)"
    )
    demo.add_argument("--sites", type=int, default=4, help="how many sites run the flow (4)")
    demo.set_defaults(command=_demo)
    _add_bench(commands)
    _add_sim(commands)
    _add_paper(commands)
    _add_chaos(commands)
    return parser


def _add_sim(commands: Any) -> None:
    sim = commands.add_parser(
        "sim",
        help="try faults on a simulated cluster, and check everything",
        description="Runs flows on simulated sites in virtual time, with faults that seeds decide, "
        "and checks after every run that the result is exact and everything is protected again. "
        "A schedule that fails is made small and drawn. Exit status 1 if one does.",
    )
    sim.add_argument("--seeds", type=int, default=200, help="how many runs (200)")
    sim.add_argument("--seed", type=int, help="just this run; with --seeds, the first one")
    sim.add_argument("--trace", action="store_true", help="show and draw the run of --seed")
    sim.add_argument(
        "--flow",
        choices=("dmz", "splits", "windows", "times", "timeouts", "diamond", "poison"),
        default="dmz",
    )
    protocols = ("pairs", "triples", "active", "passive", "upstream", "rollback")
    sim.add_argument("--protocol", choices=protocols, default="pairs")
    sim.add_argument(
        "--then", choices=protocols, help="protect the first keyed stage so later on, meanwhile"
    )
    sim.add_argument(
        "--apps", type=int, default=0, help="applications (several for one run in eight)"
    )
    sim.add_argument("--bug", help="plant a bug, to see it caught; 'list' names them")
    sim.add_argument("--exhaustive", action="store_true", help="every crash point of a small flow")
    sim.add_argument("--out", default=".", help="where drawings of failures go (.)")
    sim.set_defaults(command=_sim)


def _add_paper(commands: Any) -> None:
    paper = commands.add_parser(
        "paper",
        help="a paper's simulations again, beside Holdfast under the same conditions",
        description="hwang05: A Comparison of Stream-Oriented High-Availability Algorithms, 2005. "
        "Prints what passive standby, active standby and upstream backup cost and how long they "
        "take to recover: in the paper, in a model of it, and in Holdfast.",
    )
    paper.add_argument("name", choices=("hwang05",), help="which one")
    paper.add_argument("--out", metavar="FOLDER", help="draw the figures there, as SVG")
    paper.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    paper.add_argument("--quick", action="store_true", help="shorter and fewer runs")
    paper.set_defaults(command=_paper)


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a flow file",
        description="Runs a Python file that defines `flow` (a holdfast.Flow), or a function "
        "`flow(spark)` that returns one. The same file can go to spark-submit if it starts the "
        "flow itself under `if __name__ == '__main__'`. SIGTERM and Ctrl-C stop the flow: no more "
        "rows are taken, those that were are delivered, and with --checkpoint its state is "
        "written. A second one gives that up.",
        epilog="example: holdfast run examples/dmz.py --sites 4 --master 'local[8]'",
    )
    run.add_argument("file", metavar="FLOW.py", help="the file that defines the flow")
    run.add_argument("--sites", type=int, default=2, help="how many sites run the flow (2)")
    run.add_argument("--spares", type=int, default=0, help="sites that wait in reserve (0)")
    run.add_argument("--partitions", type=int, default=32, help="partitions of a keyed stage (32)")
    run.add_argument(
        "--host",
        choices=("spark", "process"),
        default="spark",
        help="where sites run: as Spark tasks, or as plain processes on this machine (spark)",
    )
    run.add_argument(
        "--master", help="Spark master to connect to (an embedded one with room for the sites)"
    )
    run.add_argument(
        "--apps",
        type=int,
        default=1,
        help="host the flow in so many applications, so that it outlives any of them (1)",
    )
    run.add_argument(
        "--arbiter",
        metavar="URL",
        help="where several applications settle who leads: file:/path, or zk://host:port,...",
    )
    run.add_argument(
        "--app", type=int, help="be just this one of the applications, with --controls"
    )
    run.add_argument(
        "--controls",
        metavar="HOST:PORT,...",
        help="where each application's control listens; all need the same HOLDFAST_SECRET",
    )
    run.add_argument("--seconds", type=float, help="stop after so long (when the sources end)")
    run.add_argument("--listen", help="address that controller and sites listen on")
    run.add_argument(
        "--http",
        metavar="HOST:PORT",
        help="serve metrics, status and tables there; with --apps each at a port of its own, from "
        "PORT on",
    )
    run.add_argument(
        "--checkpoint", metavar="PATH", help="write the state to this folder when it is stopped"
    )
    run.add_argument(
        "--checkpoint-interval",
        metavar="SECONDS",
        type=float,
        help="and so often while it runs, so that it can be resumed if everything is lost",
    )
    run.add_argument(
        "--restore-from",
        metavar="PATH",
        help="go on from what --checkpoint has written, and write there again, as often as before",
    )
    run.add_argument("--quiet", action="store_true", help="no live table")
    run.add_argument("--json", metavar="FILE", help="write the final status to FILE")
    run.set_defaults(command=_run)


def _add_check(commands: Any) -> None:
    check = commands.add_parser(
        "check",
        help="verify what --checkpoint has written",
        description="Reads everything in a folder that a flow was stored in, and says what is in "
        "it, what is damaged, and what can be done. Exit status 1 if something is damaged, or if "
        "there is nothing to go on from. A flow that runs is not disturbed.",
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
        help="list the queries that read an outlet of a running flow, or have one forgotten",
        description="Lists the readers of a sink that is an outlet: up to which epoch each has "
        "everything, and what is held for it. With --forget nothing is held any more for a reader "
        "that will not come back; if it does and lacks rows that have gone, it is refused.",
        epilog="example: HOLDFAST_FLOW=holdfast://... holdfast readers alerts --forget nightly",
    )
    readers.add_argument("sink", metavar="SINK", help="the outlet's name in the flow")
    readers.add_argument(
        "--flow",
        metavar="URL",
        help="what run.url of the running flow says (the environment's HOLDFAST_FLOW, where other "
        "users of the machine do not see the secret in it)",
    )
    readers.add_argument("--forget", metavar="NAME", help="hold nothing for this reader any more")
    readers.set_defaults(command=_readers)


def _add_advise(commands: Any) -> None:
    advise = commands.add_parser(
        "advise",
        help="measure a flow and propose how to protect it",
        description="Runs a flow file unprotected on plain processes for a while, with its sinks "
        "replaced by ones that only count, and predicts what each protection would cost and how "
        "long a loss would be felt, by models that were fitted to `holdfast bench protections`. "
        "Proposes the cheapest protection of every stage that is within both bounds, and says "
        "what else there is. Exit status 1 if nothing is.",
        epilog="example: holdfast advise examples/dmz.py --recovery 200ms --overhead 10%",
    )
    advise.add_argument("file", metavar="FLOW.py", nargs="?", help="the file that defines the flow")
    advise.add_argument(
        "--recovery",
        metavar="TIME",
        type=_argument("duration_ms"),
        help="how late a row may be by a loss, from when that is known: 200ms, 1.5s",
    )
    advise.add_argument(
        "--overhead",
        metavar="PERCENT",
        type=_argument("percentage"),
        help="how much of the maximum rate may be given up: 10%%",
    )
    advise.add_argument("--sites", type=int, default=4, help="how many sites will run it (4)")
    advise.add_argument(
        "--partitions", type=int, default=32, help="partitions of a keyed stage (32)"
    )
    advise.add_argument("--seconds", type=float, default=10.0, help="how long it is looked at (10)")
    advise.add_argument(
        "--master", help="Spark master for a file that defines `flow(spark)` (an embedded one)"
    )
    advise.add_argument(
        "--fit",
        metavar="FILE",
        help="go by these figures of `holdfast bench protections`; without FLOW.py, print the "
        "constants they give, and with --json write them as they are shipped",
    )
    advise.add_argument("--json", metavar="FILE", help="write the advice to FILE")
    advise.set_defaults(command=_advise)


def _argument(name: str) -> Callable[[str], float]:
    """A parser of `holdfast.advise.command` whose errors argparse shows."""

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
        help="measure Holdfast, and Spark beside it",
        description="Runs a benchmark, prints a table and optionally writes its figures as JSON. "
        "throughput: the network-monitoring flow against Structured Streaming on the same cores. "
        "scaling: cost per row as keys and partitions grow. "
        "failover: what kill -9 of sites and of a Spark driver does to the output, under pairs. "
        "protections: what each of them costs, and how long a kill -9 is felt. "
        "sim: how many simulated recoveries a second, and what they have tried. "
        "ends: rows from Spark and Kafka into a flow and back, against Spark copying them.",
    )
    bench.add_argument("name", choices=BENCHES, help="which one")
    bench.add_argument("--quick", action="store_true", help="fewer rows and repeats")
    bench.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    bench.add_argument(
        "--out",
        metavar="FOLDER",
        help="where the picture of protections goes, as SVG (beside FILE)",
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
        help="kill, stop and cut off sites of a flow under load, and check the result",
        description="Runs a flow under load, protected as asked on 4 sites, and kills and stops "
        "its sites, breaks their connections and cuts their network, at moments that a seed "
        "decides; never more than the protection promises to survive. On Spark also executors "
        "are killed, "
        "and then, with the flow in two applications, drivers; and their ZooKeeper is killed or "
        "stopped, and comes back. Prints what that did to the output. "
        "Exit status 1 if a row is lost, repeated or wrong, if the flow fails, or if it is not "
        "protected again at the end.",
        epilog="example: holdfast chaos --faults 50 --seed 7",
    )
    long = chaos.add_mutually_exclusive_group()
    long.add_argument("--faults", type=int, help="how many faults (50)")
    long.add_argument("--minutes", type=float, help="faults for so long instead")
    chaos.add_argument("--seed", type=int, help="what decides about the faults (a random one)")
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
        help="with 2 only the faults to applications and their arbiter, on either host (1)",
    )
    chaos.add_argument(
        "--protection",
        choices=("pairs", "active", "passive", "upstream", "rollback"),
        default="pairs",
        help="how the flow is protected (pairs)",
    )
    chaos.add_argument(
        "--flow",
        choices=("dmz", "windows"),
        help="the network-monitoring flow, or windows over event time (dmz, but windows under "
        "upstream and rollback, which refuse state from all rows of a key)",
    )
    chaos.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    chaos.add_argument("--verbose", action="store_true", help="say what is done while it is done")
    chaos.set_defaults(command=_chaos)


def _run(options: argparse.Namespace, console: Console) -> int:
    if options.apps > 1:
        return _run_apps(options, console)
    spark = _session(options) if options.host == "spark" else None
    try:
        # An application of several is only taken away from the flow, which goes on without it.
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
            f"going on from {options.restore_from}; stored at {run.options.store} {often}"
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
            hint="set HOLDFAST_FLOW, or give --flow, to what run.url of the running flow says",
        )
    if options.forget is not None:
        forget_reader(url, options.sink, options.forget)
    found = readers_of(url, options.sink)
    table = Table("reader", "state", "epoch", "epochs behind", "bytes held", "seen s ago")
    for row in found:
        seen = row["seen_s_ago"]
        figures = (row["epoch"], row["epochs_behind"], row["bytes_held"])
        ago = "" if seen is None else f"{seen:.1f}"
        table.add_row(row["reader"], row["state"], *(f"{n:,}" for n in figures), ago)
    console.print(table if found else f"nobody has read {options.sink!r} yet")
    return 0


def _advise(options: argparse.Namespace, console: Console) -> int:
    from holdfast.advise import command
    from holdfast.advise.propose import Bounds

    if options.file is None:
        if options.fit is None:
            raise FlowError("advise needs a FLOW.py, or --fit FILE to look at its constants")
        command.refit(options.fit, options.json, console)
        return 0
    if options.recovery is None or options.overhead is None:
        raise FlowError(
            "advise needs to know what is wanted",
            hint="for example --recovery 200ms --overhead 10%",
        )
    found, spark = _defined(options.file), None
    if not isinstance(found, Flow):  # Spark feeds it, though its sites are plain processes
        options.spares = 0
        spark = _session(options)
    try:
        advice = command.advise(
            found if isinstance(found, Flow) else _made(options.file, found, spark),
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
        raise FlowError("--checkpoint and --restore-from are for a flow in one application")
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
        raise FlowError(f"--checkpoint-interval {interval}: it is a number of seconds above 0")
    if interval is not None and path is None:
        raise FlowError("--checkpoint-interval needs --checkpoint, a folder to write to")
    if options.checkpoint is None and interval is None:
        return None
    return Checkpoint(path, interval=interval)


def _place(options: argparse.Namespace) -> Place | None:
    if options.app is None and options.controls is None:
        return None
    if options.app is None or options.controls is None or options.arbiter is None:
        raise FlowError("--app, --controls and --arbiter belong together")
    try:
        pairs = [text.rsplit(":", 1) for text in options.controls.split(",")]
        controls = tuple((host, int(port)) for host, port in pairs)
    except ValueError:
        raise FlowError(f"--controls {options.controls}: not HOST:PORT,HOST:PORT") from None
    if not 0 <= options.app < len(controls):
        raise FlowError(f"--app {options.app}: --controls names {len(controls)} applications")
    return Place(options.app, controls, options.arbiter)


def _secret(options: argparse.Namespace) -> bytes | None:
    """What the applications of a flow have in common, and nobody else."""
    text = os.environ.get("HOLDFAST_SECRET", "")
    if options.app is not None and len(text) < 16:
        raise FlowError("HOLDFAST_SECRET must be the same 16 characters or more everywhere")
    return text.encode() if options.app is not None else None


def _session(options: argparse.Namespace) -> Any:
    from holdfast.spark.session import local_session, session

    if options.master is None:
        return local_session("holdfast", options.sites + options.spares + 4)
    return session("holdfast", options.master)


def load_flow(path: str, spark: Any) -> Flow:
    """The flow that a file defines."""
    return _made(path, _defined(path), spark)


def _defined(path: str) -> Flow | Callable[[Any], Any]:
    """What a file calls `flow`: one, or a function that makes one."""
    if not os.path.isfile(path):
        raise FlowError(f"there is no file {path}")
    # Not "__main__", so that a file that starts its flow itself does not do so here.
    found = runpy.run_path(path, run_name="holdfast_flow_file").get("flow")
    if not isinstance(found, Flow) and not callable(found):
        raise _no_flow(path)
    return found


def _made(path: str, found: Flow | Callable[[Any], Any], spark: Any) -> Flow:
    flow = found if isinstance(found, Flow) else found(spark)
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
        raise FlowError(f"bench {options.name} draws nothing", hint="leave out --out")
    figures = module.bench(quick=options.quick, console=console)
    if options.json:
        write_json(options.json, figures)
    if hasattr(module, "picture") and (options.out or options.json):
        drawn = Path(options.json or f"{options.name}.json").with_suffix(".svg")
        if options.out:
            drawn = Path(options.out) / drawn.name
        drawn.parent.mkdir(parents=True, exist_ok=True)
        drawn.write_text(module.picture(figures))
        console.print(f"the picture is {drawn}", highlight=False, soft_wrap=True)
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
