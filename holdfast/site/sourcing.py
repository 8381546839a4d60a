"""The sources of a node: what they have is read ahead and offered to the sequencer by the replica
that leads, and the other replicas are kept in the picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.api.options import Options
from holdfast.core.dataflow import Dataflow
from holdfast.core.ids import GroupId, SiteId, StageId, TaskId
from holdfast.core.records import Block
from holdfast.net import wire
from holdfast.site.ingress import Split
from holdfast.site.stages import SiteStages

_SAID = float("inf")


class Sourcing:
    """`send` reaches another site, `to_sequencer` whoever cuts epochs just now."""

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
        """By split: since when it has had no rows, or that this was said."""
        self._asked: dict[tuple[int, int], float] = {}
        """When a split that had no rows was asked for some last."""

    def _leads(self, task: TaskId) -> bool:
        view = self._dataflow.view
        return view is not None and view.group(task).led_by(self._dataflow.site)

    # --- what there is --------------------------------------------------------------------------

    def announce_again(self) -> None:
        """The sequencer may be another, or this site may lead where it did not."""
        led: set[tuple[int, int]] = set()
        for task, split in self._stages.splits():
            if self._leads(task) and self._dataflow.tasks[task].has_state:
                led.add((task[0], split.number))
                self._to_sequencer(wire.Blocks(task[0], split.number, (), True))
                self._announce(task, split, split.blocks())
                if split.ended or self._quiet_since.get((task[0], split.number)) == _SAID:
                    self._say_quiet(task[0], split)
        # Where another site leads, rows may have come that were not seen here.
        self._quiet_since = {key: at for key, at in self._quiet_since.items() if key in led}

    def _say_quiet(self, source: int, split: Split) -> None:
        said = wire.SplitState(source, split.number, split.ended, split.next)
        self._to_sequencer(said)

    def _announce(self, task: TaskId, split: Split, blocks: Sequence[Block]) -> None:
        """One message for each block: together their steps could be too much for one."""
        for block in blocks:
            self._to_sequencer(wire.Blocks(task[0], split.number, (block,), False))

    def read_ahead(self, only_leading: bool) -> None:
        """Read what the sources have, up to the limit; the leading replica offers it."""
        if self._dataflow.last is not None:
            return  # what comes now is in no epoch any more
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
                return  # that was all there is; asking again at once would only find crumbs
        else:
            return
        if leads and split.ended:
            self._say_quiet(source, split)
        elif leads:
            self._notice_quiet(source, split)

    def _notice_quiet(self, source: int, split: Split) -> None:
        now, key = self._now(), (source, split.number)
        if self._options.idle_ms is None or not split.reader.caught_up():
            self._quiet_since.pop(key, None)
            return
        idle_s = self._options.idle_ms / 1e3
        asked, self._asked[key] = self._asked.get(key, now), now
        if asked < now - idle_s and self._quiet_since.get(key) != _SAID:
            self._quiet_since.pop(key, None)  # this site was away, not the rows
        if self._quiet_since.setdefault(key, now) < now - idle_s:
            self._quiet_since[key] = _SAID
            self._say_quiet(source, split)

    # --- replicas that only follow ----------------------------------------------------------------

    def tell_positions(self) -> None:
        """Tell replicas that only follow where the rows are that come next."""
        for task, split in self._stages.splits():
            position = split.position if self._leads(task) else None
            if position is None or not self._stages.tasks[task].guard.followers:
                continue
            assert self._dataflow.view is not None
            for site in self._dataflow.view.group(task).replicas[1:]:
                said = wire.SplitAt(task[0], split.number, split.first, position)
                self._send(site, said)

    def on_split_at(self, message: wire.SplitAt) -> None:
        for task, split in self._stages.splits():
            meant = (task[0], split.number) == (message.source, message.split)
            if meant and self._dataflow.tasks[task].follows:
                split.note(message.row, message.position)

    # --- rows that were pushed ------------------------------------------------------------------

    def on_push_batch(self, site: SiteId, message: wire.PushBatch, body: memoryview) -> None:
        held = self._dataflow.tasks.get((StageId(message.source), GroupId(0)))
        if held is None or not held.has_state:
            return  # when it is installed it asks for what it lacks
        reader = self._stages.pushed()[message.source]
        if reader.leads:
            return  # from one that led before and does not know yet that it does not any more
        reader.on_push_batch(message, body)
        self._send(site, wire.PushHas(message.source, reader.has, False))

    def on_push_has(self, site: SiteId, message: wire.PushHas) -> None:
        reader = self._stages.pushed().get(message.source)
        if reader is None or not reader.leads:
            return
        if reader.on_has(site, message.number, message.again):
            self._send(site, wire.PushCounted(message.source))

    def ask_for_push_batches(self) -> None:
        """Tell the leading ingress of each push source what this replica has, and get the rest."""
        view = self._dataflow.view
        for source, reader in self._stages.pushed().items():
            task = (StageId(source), GroupId(0))
            if view is not None and not reader.leads and self._dataflow.tasks[task].has_state:
                leader = view.group(task).replicas[0]
                self._send(leader, wire.PushHas(source, reader.has, True))
