"""What reaches a control node, and what it orders: see `holdfast.control.node`."""

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
    ProtectionWanted,
    Renewed,
    Resigned,
    StopRequested,
)
from holdfast.core.ids import Entry, SiteId
from holdfast.core.layout import View
from holdfast.core.values import value
from holdfast.net import wire

# --- events -------------------------------------------------------------------------------------


@value
class Began:
    """The application runs, and listens."""


@value
class SiteSaid:
    """A message from a site; `pulse`: from the thread of it that only beats."""

    site: SiteId
    message: wire.Message
    pulse: bool = False


@value
class SiteLost:
    """The connection to a site broke. Its process may live."""

    site: SiteId


@value
class PulseLost:
    """The connection to the thread of a site that beats broke."""

    site: SiteId


@value
class ProcessExited:
    """A process that was launched here has ended."""

    site: SiteId
    reason: str


@value
class AgentOpened:
    """Another application's control has connected to this one, which it believes to lead."""

    app: int


@value
class AgentLost:
    app: int


@value
class AgentSaid:
    app: int
    message: wire.Exited


@value
class LeaderOpened:
    """There is a connection to the control that leads."""

    holder: str


@value
class LeaderLost:
    """It broke, or the other side has hung up: it does not lead."""


@value
class LeaderSaid:
    message: wire.Launch | wire.Dismiss


@value
class Probed:
    """Of the sites that were probed these have nobody listening any more."""

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
    | StopRequested
    | ProtectionWanted
    | FlowFailed
)

# --- timers -------------------------------------------------------------------------------------


@value
class LeadTimer:
    """To ask for the lead, or for more of it."""


@value
class WatchTimer:
    """To look for sites that are silent, cut off from each other, hung or stuck."""


@value
class InquireTimer:
    """To find out which of the suspects are dead."""


@value
class LaunchTimer:
    """To launch a site, if the term is still the same."""

    term: int
    site: SiteId


@value
class WaitTimer:
    """What the controller waits for, if the term is still the same."""

    term: int
    wait: core_timers.Timer


Timer = LeadTimer | WatchTimer | InquireTimer | LaunchTimer | WaitTimer

# --- effects ------------------------------------------------------------------------------------


@value
class SendSite:
    """Send a message to a site. Addresses in it may be led elsewhere: see `Route`."""

    site: SiteId
    message: wire.Message


@value
class ExpelSite:
    """Tell a site to leave, also its thread that beats, and hang up on it."""

    site: SiteId
    message: wire.Fenced


@value
class SendAgent:
    """Send a message to another application's control that follows this one."""

    app: int
    message: wire.Launch | wire.Dismiss


@value
class HangUpOnAgents:
    """Close the connections of these: this one does not lead."""

    apps: tuple[int, ...]


@value
class TellAgents:
    """Tell those that follow how the flow is."""


@value
class DialLeader:
    """Connect to the control that the entry names. Answer `LeaderOpened`, `LeaderGone` if nobody
    listens there, or nothing."""

    entry: Entry


@value
class SendLeader:
    message: wire.Exited


@value
class HangUpOnLeader:
    """This one leads."""


@value
class LaunchHere:
    """Have the host of this application start a site's process."""

    site: SiteId


@value
class Probe:
    """Find out at which of these addresses nobody listens. Answer `Probed`."""

    number: int
    addresses: dict[SiteId, tuple[str, int]]


@value
class SetTimer:
    timer: Timer
    seconds: float


@value
class ViewGiven:
    """A view is committed, and its members have been told."""

    view: View


@value
class FlowRuns:
    """Rows may be taken, by order of this application: feed push sources. `begins`: none has been
    taken before."""

    begins: bool


@value
class Attached:
    """The flow is known to run, here or elsewhere: whoever waits for that need not any more."""


@value
class StopFeeding:
    """Do not feed sources any more: the flow takes no more rows, or another application leads."""


@value
class Note:
    """For the log."""

    text: str
    warns: bool = False


@value
class End:
    """The flow is over, for this application."""

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
