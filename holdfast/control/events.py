"""The events and effects of a control node: see `holdfast.control.node`."""

from __future__ import annotations

from holdfast.core import timers as core_timers
from holdfast.core.effects import ArbiterAsk
from holdfast.core.events import (
    ArbiterUnreachable,
    CommitRefused,
    Committed,
    EntryRead,
    FlowFailed,
    LeaderGone,
    LeadGranted,
    LeadRefused,
    LeaseLost,
    Renewed,
    Resigned,
    StoreUnderWay,
)
from holdfast.core.ids import Entry, SiteId
from holdfast.core.layout import View
from holdfast.core.requests import Request
from holdfast.core.values import value
from holdfast.net import wire

# --- events -------------------------------------------------------------------------------------


@value
class Began:
    """The application runs and listens."""


@value
class SiteSaid:
    """A message from a site."""

    site: SiteId
    message: wire.Message


@value
class SiteLost:
    """The connection to a site broke. Its process may live."""

    site: SiteId


@value
class PulseLost:
    """The connection to a site's heartbeat thread broke."""

    site: SiteId


@value
class ProcessExited:
    """A process that was launched here has ended."""

    site: SiteId
    reason: str


@value
class AgentOpened:
    """The control of another application has connected, because it believes that this one leads."""

    app: int


@value
class AgentLost:
    """The connection to the control of an application that follows broke."""

    app: int


@value
class AgentSaid:
    """A message from the control of another application, which takes this one for the leader."""

    app: int
    message: wire.Message


@value
class LeaderOpened:
    """This control is connected to the one that leads."""

    holder: str


@value
class LeaderLost:
    """The connection to the leader broke, or the other side closed it because it does not lead."""


@value
class LeaderSaid:
    """A message from the leader."""

    message: wire.Message


@value
class Probed:
    """The result of a probe: at the addresses of these sites no process listens."""

    number: int
    gone: tuple[SiteId, ...]


@value
class TimerFired:
    timer: Timer


ArbiterAnswer = (
    LeadGranted
    | LeadRefused
    | Renewed
    | LeaseLost
    | Resigned
    | EntryRead
    | Committed
    | CommitRefused
    | ArbiterUnreachable
)

ControlEvent = (
    Began
    | SiteSaid
    | SiteLost
    | PulseLost
    | ProcessExited
    | AgentOpened
    | AgentLost
    | AgentSaid
    | LeaderOpened
    | LeaderLost
    | LeaderSaid
    | LeaderGone
    | Probed
    | TimerFired
    | ArbiterAnswer
    | Request
    | FlowFailed
    | StoreUnderWay
)

# --- timers -------------------------------------------------------------------------------------


@value
class LeadTimer:
    """It is time to ask for the lead or to renew it."""


@value
class WatchTimer:
    """It is time to look for sites that are silent, partitioned, hung or stuck."""


@value
class InquireTimer:
    """It is time to find out which suspects are dead."""


@value
class LaunchTimer:
    """It is time to launch a site, if the term is still the same."""

    term: int
    site: SiteId


@value
class WaitTimer:
    """A timer of the controller, if the term is still the same."""

    term: int
    wait: core_timers.Timer


Timer = LeadTimer | WatchTimer | InquireTimer | LaunchTimer | WaitTimer

# --- effects ------------------------------------------------------------------------------------


@value
class SendSite:
    """Send a message to a site. Addresses in it may be replaced: see `Route`."""

    site: SiteId
    message: wire.Message


@value
class ExpelSite:
    """Send a site, and its heartbeat thread, the message to leave, and close the connections."""

    site: SiteId
    message: wire.Fenced


@value
class SendAgent:
    """Send a message to the control of an application that follows."""

    app: int
    message: wire.Launch | wire.Dismiss


@value
class HangUpOnAgents:
    """Close the connections to these applications: this one does not lead."""

    apps: tuple[int, ...]


@value
class TellAgents:
    """Send the flow's status to the applications that follow."""


@value
class DialLeader:
    """Connect to the control that the entry names. Answer `LeaderOpened`, or `LeaderGone` if no
    process listens there; if it does not answer, nothing."""

    entry: Entry


@value
class SendLeader:
    """Send a message to the control that leads."""

    message: wire.Exited


@value
class HangUpOnLeader:
    """Close the connection to the control that led: this one leads."""


@value
class LaunchHere:
    """Have the host of this application start a site's process."""

    site: SiteId


@value
class Probe:
    """Find out at which of these addresses no process listens. Answer `Probed`."""

    number: int
    addresses: dict[SiteId, tuple[str, int]]


@value
class SetTimer:
    """Answer `TimerFired` after this time."""

    timer: Timer
    seconds: float


@value
class ViewGiven:
    """A view is committed, and sent to its members."""

    view: View


@value
class FlowRuns:
    """The flow takes rows, and this application leads: feed push sources. `begins`: no row was
    taken before."""

    begins: bool


@value
class Attached:
    """The flow runs, led by this application or another: the wait for its start is over."""


@value
class StopFeeding:
    """Stop feeding push sources: the flow takes no more rows, or another application leads."""


@value
class Note:
    """Write a line to the log."""

    text: str
    warns: bool = False


@value
class End:
    """The flow has ended for this application."""

    error: Exception | None


ControlEffect = (
    ArbiterAsk
    | SendSite
    | ExpelSite
    | SendAgent
    | HangUpOnAgents
    | TellAgents
    | DialLeader
    | SendLeader
    | HangUpOnLeader
    | LaunchHere
    | Probe
    | SetTimer
    | ViewGiven
    | FlowRuns
    | Attached
    | StopFeeding
    | Note
    | End
)
