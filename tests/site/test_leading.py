"""A control and its arbiter: what is committed, when the answer gets lost; and who leads again."""

import asyncio
from pathlib import Path

import msgspec

from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.arbiter import Arbiter, Entry
from holdfast.arbiter.memory import MemoryArbiter
from holdfast.control.hosting import Place
from holdfast.control.server import Committed, Control
from holdfast.core.controller import first_id
from holdfast.core.effects import CommitView
from holdfast.core.events import SiteRegistered, SitesFailed, ViewSeen
from holdfast.core.layout import Domain
from holdfast.errors import ArbiterAway
from holdfast.plan.planner import plan
from holdfast.protections import pairs
from holdfast.sinks import discard
from holdfast.site.runtime import OnExit, SiteConfig

from .test_pairs import one_line


class NoHost:
    """Launches nothing."""

    name = application = "none"
    listen_host = advertise_host = "127.0.0.1"

    def launch(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None:
        pass

    def close(self) -> None:
        pass


class Forgetful(MemoryArbiter):
    """The first answer to a commit gets lost."""

    heard = False

    def commit(self, expected: Entry, value: bytes) -> Entry:
        entry = super().commit(expected, value)
        if not self.heard:
            self.heard = True
            raise ArbiterAway(where="here", cause="the answer got lost")
        return entry


def leading(arbiter: Arbiter, folder: Path) -> Control:
    """The control of a flow that runs on four sites, in two applications."""
    flow = one_line(discard(), pairs())
    place = Place(0, (("127.0.0.1", 1), ("127.0.0.1", 2)), f"file:{folder}")
    options = Options(partitions=4, lease=0.1)
    control = Control(flow, plan(flow), NoHost(), 4, 0, options, b"secret" * 6, place)
    control._arbiter = arbiter
    control.loop.run_until_complete(begin(control))
    return control


async def begin(control: Control) -> None:
    control._over = control.loop.create_future()
    entry = control._arbiter.lead("here")
    assert entry is not None
    await control._lead(entry)
    assert control.controller is not None
    for site in list(control.controller.sites):
        domain = Domain(f"p{site}", f"e{site}", "h", f"application {site % 2}")
        control.controller.handle(SiteRegistered(site, ("127.0.0.1", 9), domain))
    view = control.controller.view
    assert view is not None
    for site in view.members:
        control.controller.handle(ViewSeen(site, view.term, view.number))
    assert control.controller.running


def commit(control: Control) -> None:
    assert control.controller is not None and control.controller.view is not None
    control._apply(CommitView(control.controller.view, {}))


def test_a_commit_whose_answer_got_lost_is_not_somebody_elses(tmp_path: Path) -> None:
    """Also if another view has come up before it is said again."""
    arbiter = Forgetful("flow", 60.0)
    control = leading(arbiter, tmp_path)

    async def scene() -> None:
        assert control.controller is not None
        commit(control)
        while not arbiter.heard:
            await asyncio.sleep(0.001)
        control.controller.handle(SitesFailed((first_id(1),), "killed"))
        commit(control)
        await control._pending

    control.loop.run_until_complete(scene())
    assert control.controller is not None, "it still leads"
    assert control._uncommitted is None
    known = msgspec.msgpack.decode(arbiter.read().value, type=Committed)
    assert known.view == control.controller.view and first_id(1) not in known.view.members


def test_who_has_stepped_down_does_not_lead_again_in_the_same_term(tmp_path: Path) -> None:
    """Sites would be given numbers that others have, and say nothing again."""
    control = leading(MemoryArbiter("flow", 60.0), tmp_path)
    terms = []

    async def scene() -> None:
        control._step_down("somebody said so")
        while control.controller is None:
            entry = control._arbiter.lead("here")
            if entry is not None:
                await control._lead(entry)
        terms.append(control.controller.term)

    control.loop.run_until_complete(scene())
    assert terms == [2]
