"""The registry of messages is complete, and its receivers have the handlers that it promises."""

import inspect

import pytest

from holdfast.control.node import ControlNode
from holdfast.control.rotating import KeyRotator
from holdfast.control.server import Control
from holdfast.errors import ProtocolError
from holdfast.net import protocol, wire
from holdfast.net.client import Client
from holdfast.net.protocol import RULES, Receiver, Rule
from holdfast.site.node import SiteNode
from holdfast.site.pushers import PushReaders
from holdfast.site.runtime import Site
from holdfast.site.sequencing import Sequencing
from holdfast.site.serving import Serving
from holdfast.site.sourcing import Sourcing
from holdfast.site.transfers import Transfers

CLASSES: dict[Receiver, type] = {
    Receiver.SITE: Site,
    Receiver.NODE: SiteNode,
    Receiver.SEQUENCING: Sequencing,
    Receiver.SOURCING: Sourcing,
    Receiver.SERVING: Serving,
    Receiver.TRANSFERS: Transfers,
    Receiver.PUSHES: PushReaders,
    Receiver.CONTROL: Control,
    Receiver.CONTROL_NODE: ControlNode,
    Receiver.ROTATOR: KeyRotator,
    Receiver.CLIENT: Client,
}
ROLES = {wire.SITE, wire.SERVER, wire.AGENT, wire.PULSE, wire.PUSHER, wire.READER}


def test_every_message_has_one_rule() -> None:
    messages = [rule.message for rule in RULES]
    assert len(set(messages)) == len(messages)
    assert set(messages) == set(wire.MESSAGES)


def test_receivers_are_called_by_the_names_of_their_classes() -> None:
    assert {receiver: cls.__name__ for receiver, cls in CLASSES.items()} == {
        receiver: receiver.value for receiver in Receiver
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.message.__name__)
def test_receivers_have_handlers_that_fit(rule: Rule) -> None:
    assert rule.senders and set(rule.senders) <= ROLES
    assert rule.receivers
    for receiver in rule.receivers:
        if receiver is Receiver.CLIENT:
            continue  # a client waits for the answer to what it asked, and gets nothing else
        handler = getattr(CLASSES[receiver], protocol.handler_name(rule.message))
        given = list(inspect.signature(handler).parameters.values())[1:]
        assert len(given) == 2 + rule.has_body, handler
        assert given[1].annotation == f"wire.{rule.message.__name__}", handler


@pytest.mark.parametrize("receiver", Receiver)
def test_nobody_handles_what_is_not_for_it(receiver: Receiver) -> None:
    names = {protocol.handler_name(message): message for message in wire.MESSAGES}
    rules = {rule.message: rule for rule in RULES}
    for name in set(dir(CLASSES[receiver])) & set(names):
        signature = inspect.signature(getattr(CLASSES[receiver], name))
        takes = {str(parameter.annotation) for parameter in signature.parameters.values()}
        if f"wire.{names[name].__name__}" in takes:
            assert receiver in rules[names[name]].receivers, f"{receiver.value}.{name}"


def test_every_order_carries_a_term_that_is_found() -> None:
    for rule in RULES:
        if Receiver.CLIENT in rule.receivers or rule.message is wire.Status:
            continue
        if wire.SERVER in rule.senders and rule.message is not wire.NewView:
            assert "term" in rule.message.__struct_fields__, rule.message
    assert protocol.term_of(wire.Start(7)) == 7
    assert protocol.term_of(wire.Seen(7, 1)) is None, "a report is no order"


def test_a_message_without_a_receiver_here_is_refused() -> None:
    with pytest.raises(ProtocolError, match="Beat is not expected here"):
        protocol.dispatch({}, None, wire.Beat(), memoryview(b""))


def test_a_body_where_none_can_be_is_refused() -> None:
    with pytest.raises(ProtocolError, match="Chained has no body"):
        protocol.validate(None, wire.Chained(), memoryview(b"x"))  # type: ignore[arg-type]
