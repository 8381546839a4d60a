"""Events of the model in words, for a counter-example."""

from __future__ import annotations

from typing import Any

from holdfast.core.messages import Ack
from holdfast.lab.model import messages as ms
from holdfast.lab.model.flow import LAST, SOURCE
from holdfast.lab.model.state import CONTROL, Move, Rows
from holdfast.lab.model.world import ModelWorld, Wrong

NAMES = {SOURCE: "source", LAST: "counts"}


def in_words(world: ModelWorld, moves: list[Move]) -> list[str]:
    """One line for each event."""
    row = world.begin()
    lines = [f"the flow starts: {world.view(int(row[world.columns.control, 0]))}"]
    for move in moves:
        lines.append(_words(world, row, move))
        try:
            row = next(found.rows for found in world.moves(row) if found.move == move)
        except Wrong:
            break
    return lines


def _words(world: ModelWorld, row: Rows, move: Move) -> str:
    who = " and ".join(str(s) for s in move.who)
    match move.kind:
        case "deliver":
            sender, receiver = (_name(s) for s in move.who)
            message = world.messages.all[_oldest(world, row, *move.who)]
            return f"{receiver} gets from {sender}: {message_in_words(message)}"
        case "local":
            return f"site {who} {_work(world, row, move)}"
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
        case _:
            return f"a timer of the controller fires: {world.timers.all[move.what]}"


def _oldest(world: ModelWorld, row: Rows, sender: int, receiver: int) -> int:
    """The message that is delivered next."""
    c = world.columns
    if CONTROL in (sender, receiver):
        site, place = (receiver, 0) if sender == CONTROL else (sender, 2)
        return int(world.control_heads(row[c.control_link[site]])[0, place])
    column, side = c.between(sender, receiver)
    return int(world.heads(row[column])[0, 3 * side])


def _work(world: ModelWorld, row: Rows, move: Move) -> str:
    machine = row[world.columns.machine[move.who[0]]]
    kind, task, *joiner = world.event(int(world.locals(machine)[0, move.what]))
    if kind == "work":
        return f"works on {_task(task)}"
    return f"sends the state of {_task(task)} to site {joiner[0]}"


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
