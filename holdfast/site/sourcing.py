"""The sources of a node. It reads their rows ahead. The leading replica announces them to the
sequencer, and tells the other replicas what they need to take over."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.api.options import Options
from holdfast.core.dataflow import Dataflow
from holdfast.core.events import BlocksAvailable, SplitQuiet
from holdfast.core.ids import GroupId, SiteId, StageId, TaskId
from holdfast.core.records import Block
from holdfast.net import wire
from holdfast.site.ingress import Split
from holdfast.site.push import PushReader
from holdfast.site.stages import SiteStages

_REPORTED = float("inf")


class Sourcing:
    """Reads the sources of one site. `send` sends a message to another site, `to_sequencer` to the
    site that currently cuts epochs."""

    def __init__(
        self,
        stages: SiteStages,
        dataflow: Dataflow,
        options: Options,
        now: Callable[[], float],
        send: Callable[..., None],
        to_sequencer: Callable[[wire.Message], None],
    ) -> None:
        self._stages, self._dataflow, self._options = stages, dataflow, options
        self._now, self._send, self._to_sequencer = now, send, to_sequencer
        self._quiet_since: dict[tuple[int, int], float] = {}
        """For each split, since when it has had no rows; `_REPORTED` once that was reported."""
        self._read_at: dict[tuple[int, int], float] = {}
        """When each split without rows was last read."""

    def _leads(self, task: TaskId) -> bool:
        view = self._dataflow.view
        return view is not None and view.group(task).led_by(self._dataflow.site)

    # --- announcing rows ------------------------------------------------------------------------

    def announce_again(self) -> None:
        """Announce all rows again: the sequencer may have changed, or this site may be a new
        leader."""
        led: set[tuple[int, int]] = set()
        for task, split in self._stages.splits():
            if self._leads(task) and self._dataflow.tasks[task].has_state:
                led.add((task[0], split.number))
                self._to_sequencer(
                    wire.Blocks(BlocksAvailable(task[0], split.number, (), again=True))
                )
                self._announce(task, split, split.blocks())
                if split.ended or self._quiet_since.get((task[0], split.number)) == _REPORTED:
                    self._report_idle(task[0], split)
        # Where another site leads, rows may have arrived without this site's knowledge.
        self._quiet_since = {key: at for key, at in self._quiet_since.items() if key in led}

    def _report_idle(self, source: StageId, split: Split) -> None:
        quiet = SplitQuiet(source, split.number, split.next, split.ended)
        self._to_sequencer(wire.Quiet(quiet))

    def _announce(self, task: TaskId, split: Split, blocks: Sequence[Block]) -> None:
        """Send one message for each block: their steps together might be too large for one."""
        for block in blocks:
            self._to_sequencer(wire.Blocks(BlocksAvailable(task[0], split.number, (block,))))

    def read_ahead(self, only_leading: bool) -> None:
        """Read rows of the sources up to the limit. The leading replica announces them."""
        if self._dataflow.records.last is not None:
            return  # no epoch will have further rows
        for reader in self._stages.pushed().values():
            reader.pull()
        for task, split in self._stages.splits():
            held = self._dataflow.tasks[task]
            wanted = self._leads(task) or not only_leading
            if wanted and held.computes:
                self.read_split(task, split, self._options.block_rows)

    def read_split(self, task: TaskId, split: Split, block_rows: int) -> None:
        source, leads = task[0], self._leads(task)
        while not split.ended and split.rows_held < self._options.read_ahead_rows:
            with self._stages.calling(self._stages.tasks[task]):
                blocks = split.read(block_rows)
            if not blocks:
                break
            self._quiet_since.pop((source, split.number), None)
            if leads:
                self._announce(task, split, blocks)
            if sum(block.rows for block in blocks) < block_rows:
                return  # that was all; reading again at once would give very small batches
        else:
            return
        if leads and split.ended:
            self._report_idle(source, split)
        elif leads:
            self._check_idle(source, split)

    def _check_idle(self, source: StageId, split: Split) -> None:
        now, key = self._now(), (source, split.number)
        if self._options.idle_ms is None or not split.reader.caught_up():
            self._quiet_since.pop(key, None)
            return
        idle_s = self._options.idle_ms / 1e3
        asked, self._read_at[key] = self._read_at.get(key, now), now
        if asked < now - idle_s and self._quiet_since.get(key) != _REPORTED:
            self._quiet_since.pop(key, None)  # this site was paused, not the source
        if self._quiet_since.setdefault(key, now) < now - idle_s:
            self._quiet_since[key] = _REPORTED
            self._report_idle(source, split)

    # --- followers --------------------------------------------------------------------------------

    def tell_positions(self) -> None:
        """Tell followers the position of the next rows."""
        for task, split in self._stages.splits():
            position = split.position if self._leads(task) else None
            if position is None or not self._stages.tasks[task].guard.followers:
                continue
            assert self._dataflow.view is not None
            for site in self._dataflow.view.group(task).replicas[1:]:
                said = wire.SplitAt(task[0], split.number, split.first, position)
                self._send(site, said)

    def on_split_at(self, site: SiteId, message: wire.SplitAt) -> None:
        for task, split in self._stages.splits():
            meant = (task[0], split.number) == (message.source, message.split)
            if meant and self._dataflow.tasks[task].follows:
                split.note(message.row, message.position)

    # --- push sources ---------------------------------------------------------------------------

    def on_push_batch(self, site: SiteId, message: wire.PushBatch, body: memoryview) -> None:
        reader = self._follower(message.source)
        if reader is not None and reader.on_push_batch(site, message, body):
            self._send(site, reader.holding(again=False))

    def on_push_known(self, site: SiteId, message: wire.PushKnown) -> None:
        reader = self._follower(message.source)
        if reader is not None and reader.on_push_known(site, message):
            self._send(site, reader.holding(again=False))

    def on_push_lead(self, site: SiteId, message: wire.PushLead) -> None:
        reader = self._follower(message.source)
        if reader is not None and reader.follows(site, message.rank):
            self._send(site, reader.holding(again=True))

    def on_push_has(self, site: SiteId, message: wire.PushHas) -> None:
        reader = self._stages.pushed().get(message.source)
        if reader is not None and reader.on_push_has(site, message):
            self._send(site, wire.PushCounted(message.source, reader.rank))

    def _follower(self, source: int) -> PushReader | None:
        """The reader of a push source; None if it has no state. Once it has, it asks for the push
        batches that it lacks."""
        held = self._dataflow.tasks.get((StageId(source), GroupId(0)))
        return self._stages.pushed()[source] if held is not None and held.has_state else None

    def ask_for_push_batches(self) -> None:
        """Tell the leading ingress of each push source which push batches this replica has. It
        sends the others."""
        view = self._dataflow.view
        for source, reader in self._stages.pushed().items():
            task = (StageId(source), GroupId(0))
            if view is not None and not reader.leads and self._dataflow.tasks[task].has_state:
                leader = view.group(task).replicas[0]
                self._send(leader, reader.holding(again=True))
