"""The registry of messages: who may send each, who receives it, and how it is validated.

`RULES` is the only place that says so. A connection refuses a message from a role that may not send
it; a site validates it (`holdfast.net.checks`); then the receiving component handles it in its
method `on_<message>`, for example `on_hand_over_begin`. A component that gets a message without
being its receiver refuses it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from holdfast.errors import ProtocolError
from holdfast.net import wire
from holdfast.net.checks import Checks
from holdfast.net.wire import AGENT, PULSE, PUSHER, READER, SERVER, SITE


class Receiver(Enum):
    """A component that handles messages. The comment says in which process it is."""

    SITE = "Site"  # a site
    NODE = "SiteNode"  # a site, and the simulator
    SEQUENCING = "Sequencing"  # in a node
    SOURCING = "Sourcing"  # in a node
    SERVING = "Serving"  # in a node
    TRANSFERS = "Transfers"  # in a node
    PUSHES = "PushReaders"  # a site
    CONTROL = "Control"  # an application's driver
    CONTROL_NODE = "ControlNode"  # in a control, and the simulator
    ROTATOR = "KeyRotator"  # in a control
    CLIENT = "Client"  # a pusher or a reader, which waits for this answer


Check = Callable[[Checks, Any, memoryview], None]


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds for one class of messages."""

    message: type[wire.Message]
    senders: tuple[str, ...]
    receivers: tuple[Receiver, ...]
    check: Check | None = None
    has_body: bool = False


_SITE = (Receiver.SITE,)
_NODE = (Receiver.NODE,)
_SEQUENCING = (Receiver.SEQUENCING,)
_SOURCING = (Receiver.SOURCING,)
_SERVING = (Receiver.SERVING,)
_TRANSFERS = (Receiver.TRANSFERS,)
_PUSHES = (Receiver.PUSHES,)
_CONTROL = (Receiver.CONTROL,)
_CONTROL_NODE = (Receiver.CONTROL_NODE,)
_ROTATOR = (Receiver.ROTATOR,)
_BOTH = (Receiver.CONTROL, Receiver.CONTROL_NODE)
_CLIENT = (Receiver.CLIENT,)

RULES: tuple[Rule, ...] = (
    # From a site to controls.
    Rule(wire.Register, (SITE,), _BOTH),
    Rule(wire.Seen, (SITE,), _CONTROL_NODE),
    Rule(wire.ReplicaReport, (SITE,), _CONTROL_NODE),
    Rule(wire.Behind, (SITE,), _CONTROL_NODE),
    Rule(wire.Unheard, (SITE,), _CONTROL_NODE),
    Rule(wire.Failed, (SITE,), _CONTROL_NODE),
    Rule(wire.Finished, (SITE,), _CONTROL_NODE),
    Rule(wire.Cut, (SITE,), _CONTROL),
    Rule(wire.TaskFiles, (SITE,), _CONTROL),
    Rule(wire.NotStored, (SITE,), _CONTROL),
    Rule(wire.Status, (SITE, SERVER), _BOTH),
    Rule(wire.Beat, (SITE, PULSE), (*_BOTH, Receiver.SITE)),
    # From the leader to sites. All of it is an order, and carries a term.
    Rule(wire.NewView, (SERVER,), _SITE),
    Rule(wire.Start, (SERVER,), _SITE),
    Rule(wire.CatchUp, (SERVER,), _NODE, Checks.catch_up),
    Rule(wire.Retain, (SERVER,), _NODE),
    Rule(wire.Drain, (SERVER,), _SEQUENCING),
    Rule(wire.Pause, (SERVER,), _SEQUENCING),
    Rule(wire.Store, (SERVER,), _NODE, Checks.store),
    Rule(wire.Recorded, (SERVER,), _NODE),
    Rule(wire.Fenced, (SERVER, SITE), _SITE),
    Rule(wire.NewKeys, (SERVER,), _SITE),
    # From the leader to sites and agents, and back.
    Rule(wire.Dismiss, (SERVER,), (Receiver.SITE, *_CONTROL_NODE)),
    Rule(wire.Launch, (SERVER,), _CONTROL_NODE),
    Rule(wire.Exited, (AGENT,), _CONTROL_NODE),
    Rule(wire.NewSecrets, (SERVER,), _ROTATOR),
    Rule(wire.KeysHeld, (SITE, AGENT), _ROTATOR),
    # Between sites: the order of the input.
    Rule(wire.Record, (SITE,), _NODE, Checks.carried_record),
    Rule(wire.RecordsAfter, (SITE,), _NODE),
    Rule(wire.Pass, (SITE,), _SEQUENCING, Checks.carried_record),
    Rule(wire.JoinChain, (SITE,), _NODE),
    Rule(wire.SequencerCopy, (SITE,), _NODE, Checks.sequencer_copy),
    Rule(wire.Chained, (SITE,), _NODE),
    Rule(wire.Blocks, (SITE,), _SEQUENCING, Checks.blocks),
    Rule(wire.Quiet, (SITE,), _SEQUENCING, Checks.quiet),
    Rule(wire.SplitAt, (SITE,), _SOURCING, Checks.split_at),
    # Between sites: frames.
    Rule(wire.Bundle, (SITE,), _NODE, Checks.bundle, has_body=True),
    Rule(wire.Acks, (SITE,), _NODE, Checks.acks),
    Rule(wire.LogRequest, (SITE,), _NODE, Checks.log_request),
    Rule(wire.LogReply, (SITE,), _NODE, Checks.log_reply),
    Rule(wire.Delivered, (SITE,), _NODE, Checks.delivered),
    # Between sites: hand-over.
    Rule(wire.HandOverBegin, (SITE,), _TRANSFERS, Checks.hand_over_begin),
    Rule(wire.HandOverState, (SITE,), _TRANSFERS, Checks.hand_over_part, has_body=True),
    Rule(wire.HandOverKept, (SITE,), _TRANSFERS, Checks.hand_over_kept, has_body=True),
    Rule(wire.HandOverHeld, (SITE,), _TRANSFERS, Checks.hand_over_part, has_body=True),
    Rule(wire.HandOverEnd, (SITE,), _TRANSFERS, Checks.hand_over_part),
    Rule(wire.HandOverRefused, (SITE,), _TRANSFERS, Checks.hand_over_part),
    # Rows that are pushed.
    Rule(wire.PushBegin, (PUSHER,), _PUSHES),
    Rule(wire.PushOpen, (PUSHER,), _PUSHES),
    Rule(wire.PushRows, (PUSHER,), _PUSHES, has_body=True),
    Rule(wire.PushDone, (PUSHER,), _PUSHES),
    Rule(wire.PushCommit, (PUSHER,), _PUSHES),
    Rule(wire.PushEnd, (PUSHER,), _PUSHES),
    Rule(wire.PushTaken, (SITE,), _CLIENT),
    Rule(wire.PushBatch, (SITE,), _SOURCING, Checks.push_batch, has_body=True),
    Rule(wire.PushCounted, (SITE,), _NODE, Checks.pushed),
    Rule(wire.PushHas, (SITE,), _SOURCING, Checks.push_has),
    Rule(wire.PushKnown, (SITE,), _SOURCING, Checks.push_known),
    Rule(wire.PushLead, (SITE,), _SOURCING, Checks.pushed),
    # Sinks that are read.
    Rule(wire.Where, (READER,), _CONTROL),
    Rule(wire.There, (SERVER,), _CLIENT),
    Rule(wire.Ask, (READER,), _SITE),
    Rule(wire.Answer, (SITE,), _CLIENT, has_body=True),
    Rule(wire.Notes, (SITE,), _SERVING, Checks.notes),
    Rule(wire.NotesKept, (SITE,), _SERVING, Checks.notes),
)

_RULE_OF: dict[type[wire.Message], Rule] = {rule.message: rule for rule in RULES}
_ORDERS = frozenset(rule.message for rule in RULES if SERVER in rule.senders)


def check_sender(role: str, message: wire.Message) -> None:
    """Refuse a message that a peer in this role may not send."""
    rule = _RULE_OF.get(type(message))
    if rule is None or role not in rule.senders:
        raise ProtocolError(f"{type(message).__name__} is not for a {role} to send")


def is_for(message: wire.Message, receiver: Receiver) -> bool:
    return receiver in _RULE_OF[type(message)].receivers


def validate(checks: Checks, message: wire.Message, body: memoryview) -> None:
    """Refuse a message that cannot be, whatever the state of the flow."""
    rule = _RULE_OF[type(message)]
    if body.nbytes and not rule.has_body:
        raise ProtocolError(f"{type(message).__name__} has no body")
    if rule.check is not None:
        rule.check(checks, message, body)


def term_of(message: wire.Message) -> int | None:
    """The term of the leader that gives an order; None if the message is no order."""
    if isinstance(message, wire.NewView):
        return message.view.term
    return getattr(message, "term", None) if type(message) in _ORDERS else None


def handler_name(message: type[wire.Message]) -> str:
    """
    >>> handler_name(wire.HandOverBegin)
    'on_hand_over_begin'
    """
    return "on_" + re.sub(r"(?<!^)(?=[A-Z])", "_", message.__name__).lower()


Handlers = Mapping[type[wire.Message], Callable[..., None]]


def handlers(components: Mapping[Receiver, object]) -> Handlers:
    """The methods of these components, by the messages that they receive."""
    return {
        rule.message: getattr(components[receiver], handler_name(rule.message))
        for rule in RULES
        for receiver in rule.receivers
        if receiver in components
    }


def dispatch(handlers: Handlers, sender: Any, message: wire.Message, body: memoryview) -> None:
    """Have the receiver of a message handle it. Only a message that may have a body passes it."""
    handler = handlers.get(type(message))
    if handler is None:
        raise ProtocolError(f"{type(message).__name__} is not expected here")
    if _RULE_OF[type(message)].has_body:
        handler(sender, message, body)
    else:
        handler(sender, message)
