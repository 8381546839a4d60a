"""Events of the model in words, for a counter-example."""

from __future__ import annotations

from typing import Any

from holdfast.core.messages import Ack
from holdfast.lab.model import messages as ms
from holdfast.lab.model.flow import LAST, SOURCE
from holdfast.lab.model.parts import Broken
from holdfast.lab.model.state import CONTROL, ModelState, Move
from holdfast.lab.model.world import ModelWorld
from holdfast.lab.sim.checks import Violation

NAMES = {SOURCE: "source", LAST: "counts"}


def in_words(world: ModelWorld, moves: list[Move]) -> list[str]:
    """One line for each event."""
    state, lines = world.begin(), [f"the flow starts: {world.view(world.begin().control)}"]
    for move in moves:
        lines.append(_words(world, state, move))
        try:
            state = world.after(state, move)
        except (Broken, Violation):
            break
    return lines


def _words(world: ModelWorld, state: ModelState, move: Move) -> str:
    who = " and ".join(str(s) for s in move.who)
    match move.kind:
        case "deliver":
            sender, receiver = (_name(s) for s in move.who)
            number = dict(state.links)[move.who[0], move.who[1]][0]
            return f"{receiver} gets from {sender}: {message_in_words(world.messages.all[number])}"
        case "work":
            return f"site {who} works on {_task(move.what)}"
        case "rest":
            return f"site {who} sends the state of {_task(move.what)} to site {move.what[2]}"
        case "crash":
            return f"site {who} crashes"
        case "notice":
            return f"the controller notices that site {who} is dead"
        case "suspect":
            return f"the controller hears nothing from site {who}, which lives"
        case "lose":
            return f"what else site {move.who[0]} had sent to {_name(move.who[1])} is lost"
        case "start":
            return f"site {who} starts and registers"
        case "timer":
            return f"a timer of the controller fires: {world.timers.all[move.what[0]]}"
        case _:
            return "another epoch is recorded"


def message_in_words(message: Any) -> str:
    match message:
        case ms.BundleSent():
            key = message.key
            return f"epoch {key.epoch} of source/{key.producer} for counts/{key.consumer}"
        case ms.AcksSent():
            return "acks: " + ", ".join(_ack(ack) for ack in message.acks)
        case ms.StateOffer():
            return f"the hand-over of {_task(message.task)} begins, after epoch {message.epoch}"
        case ms.StateSent():
            return f"the state of {_task(message.task)} after epoch {message.epoch}"
        case ms.ViewSent():
            return str(message.view)
        case ms.CatchUpSent():
            return f"hand {_task(message.task)} over to site {message.joiner}"
        case ms.ViewActedOn():
            return f"it acts on view {message.term}.{message.number}"
        case ms.ReplicaSaid():
            return f"{_task(message.task)} at site {message.site}: {message.phase}"
        case ms.SiteDone():
            return f"it has finished, in view {message.number}"
        case ms.LinkUp():
            return "the connection is up"
        case ms.LinkDown():
            return "the connection is lost"
        case _:
            return "you are declared dead"


def _ack(ack: Ack) -> str:
    wants = ", and subscribes" if ack.subscribe else ""
    return f"counts/{ack.consumer} has source/{ack.producer} up to {ack.received}{wants}"


def _task(task: tuple[int, ...]) -> str:
    return f"{NAMES[task[0]]}/{task[1]}"  # type: ignore[index]


def _name(site: int) -> str:
    return "the controller" if site == CONTROL else f"site {site}"
