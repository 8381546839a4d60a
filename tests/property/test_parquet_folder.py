"""Writers of a parquet folder against a model. In whatever order their calls come, whoever is
stopped, killed or told that a call failed, and whenever the power goes: readers see each epoch once
and of the right flow, and never lose one that was said to be durable.

Each writer is a thread that waits at every call to the disk until it is let go on, so one runs at a
time. One that is not let go on for long is a process that was stopped.
"""

import errno
import io
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.connectors.parquet_folder import PartFolder, StagingGone
from holdfast.connectors.parquet_parts import Beginning, Overtaken
from holdfast.connectors.sinks import Authority
from holdfast.errors import HoldfastError
from holdfast.storage.disk import Disk

SCHEMA = pa.schema([("incarnation", pa.string()), ("epoch", pa.int64())])
OUT = "/out"
EPOCHS = 4
"""So many a flow has before it is stopped."""


# --- a disk --------------------------------------------------------------------------------------


class File:
    def __init__(self) -> None:
        self.data = self.synced = b""


class Folder:
    def __init__(self) -> None:
        self.now: dict[str, File | Folder] = {}
        self.synced: dict[str, File | Folder] = {}


class Memory:
    """Names and contents as they are, and as they would be after a loss of power."""

    def __init__(self) -> None:
        self.root = Folder()

    def folder(self, path: str) -> Folder:
        at = self.root
        for name in path.strip("/").split("/"):
            found = at.now.get(name) if name else at
            if not isinstance(found, Folder):
                raise FileNotFoundError(errno.ENOENT, path)
            at = found
        return at

    def of(self, path: str) -> tuple[Folder, str]:
        above, _, name = path.rpartition("/")
        return (self.folder(above) if above else self.root), name

    def get(self, path: str) -> File:
        above, name = self.of(path)
        found = above.now.get(name)
        if not isinstance(found, File):
            raise FileNotFoundError(errno.ENOENT, path)
        return found

    def put(self, path: str, what: File | Folder) -> None:
        above, name = self.of(path)
        if name in above.now:
            raise FileExistsError(errno.EEXIST, path)
        above.now[name] = what

    def visible(self) -> dict[str, bytes]:
        """What a reader of the folder takes for rows."""
        try:
            names = self.folder(OUT).now
        except FileNotFoundError:
            return {}
        shown = {n: f for n, f in names.items() if n.startswith("part-") and isinstance(f, File)}
        return {n: f.data for n, f in shown.items()}

    def lose_power(self, rng: random.Random) -> None:
        """Of what was not synced any part may be there, or not."""
        todo: list[File | Folder] = [self.root]
        while todo:
            node = todo.pop()
            if isinstance(node, File):
                if node.data != node.synced:
                    node.data = node.data[: rng.randint(0, len(node.data))]
                node.synced = node.data
                continue
            for name in sorted(node.now.keys() | node.synced.keys()):
                kept = node.now if rng.random() < 0.5 else node.synced
                if name in kept:
                    node.now[name] = kept[name]
                else:
                    node.now.pop(name, None)
            node.synced = dict(node.now)
            todo.extend(node.now.values())


class MemoryFile(io.BytesIO):
    def __init__(self, file: File) -> None:
        super().__init__()
        self.file = file

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.file.data = self.getvalue()
        return written


class MemoryDisk(Disk):
    """One writer's way to the memory; `turn` waits until the call may be made."""

    def __init__(self, memory: Memory, turn: Callable[[Callable[[], Any]], Any]) -> None:
        self._memory, self._turn = memory, turn

    def make_folder(self, path: str) -> None:
        self._turn(lambda: self._memory.put(path, Folder()))

    def list(self, path: str) -> list[str]:
        return cast(list[str], self._turn(lambda: sorted(self._memory.folder(path).now)))

    def exists(self, path: str) -> bool:
        def look() -> bool:
            above, name = self._memory.of(path)
            return name in above.now

        return bool(self._turn(look))

    def create(self, path: str) -> BinaryIO:
        def create() -> File:
            file = File()
            self._memory.put(path, file)
            return file

        return MemoryFile(self._turn(create))

    def sync(self, file: BinaryIO) -> None:
        def sync() -> None:
            node = cast(MemoryFile, file).file
            node.synced = node.data

        self._turn(sync)

    def sync_folder(self, path: str) -> None:
        def sync() -> None:
            folder = self._memory.root if path == "/" else self._memory.folder(path)
            folder.synced = dict(folder.now)

        self._turn(sync)

    def link(self, source: str, target: str) -> None:
        self._turn(lambda: self._memory.put(target, self._memory.get(source)))

    def rename(self, source: str, target: str) -> None:
        def rename() -> None:
            file = self._memory.get(source)
            above, name = self._memory.of(target)
            above.now[name] = file
            old, was = self._memory.of(source)
            del old.now[was]

        self._turn(rename)

    def remove(self, path: str) -> None:
        def remove() -> None:
            self._memory.get(path)
            above, name = self._memory.of(path)
            del above.now[name]

        self._turn(remove)

    def remove_folder(self, path: str) -> None:
        def remove() -> None:
            if self._memory.folder(path).now:
                raise OSError(errno.ENOTEMPTY, path)
            above, name = self._memory.of(path)
            del above.now[name]

        self._turn(remove)

    def read(self, path: str) -> bytes:
        return bytes(self._turn(lambda: self._memory.get(path).data))

    footer = read


# --- writers -------------------------------------------------------------------------------------


class Killed(BaseException):
    """Not an error that anything could catch by mistake."""


class FlowModel:
    """What is known of a flow from outside its folder."""

    def __init__(self, incarnation: str, base: int) -> None:
        self.incarnation, self.base = incarnation, base
        self.last = base + EPOCHS
        self.durable = [base]
        """What its leaders have said, one after another."""
        self.terms = 0
        self.stopped = False


class Writer:
    """What a `ParquetWriter` does, a call at a time."""

    def __init__(self, world: "World", flow: FlowModel, beginning: Beginning) -> None:
        self.world, self.flow, self.beginning = world, flow, beginning
        flow.terms += 1
        self.term = flow.terms
        self.closes = world.rng.random() < 0.5
        self.claimed = self.closed = False
        self.doomed = False
        self.error: BaseException | None = None
        self.go, self.at_call = threading.Semaphore(0), threading.Semaphore(0)
        self.over = False
        whose = Authority("f", "out", flow.incarnation, self.term)
        disk = MemoryDisk(world.memory, self.turn)
        self.folder = PartFolder(OUT, whose, allow_missing=False, disk=disk)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        self.at_call.acquire()

    def turn(self, call: Callable[[], Any]) -> Any:
        self.at_call.release()
        self.go.acquire()
        if self.doomed:
            raise Killed
        fails = self.world.rng.random() < self.world.failures
        if fails and self.world.rng.random() < 0.5:
            raise OSError(errno.EIO, "before it was done")
        done = call()
        if fails:
            raise OSError(errno.EIO, "after it was done")
        return done

    def step(self) -> None:
        """One call further."""
        if not self.over:
            self.go.release()
            self.at_call.acquire()

    def kill(self) -> None:
        self.doomed = True
        while not self.over:
            self.step()

    def run(self) -> None:
        try:
            for _ in self.live():
                pass
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        self.over = True
        self.at_call.release()

    def live(self) -> Iterator[None]:
        durable = self.world.rng.choice(self.flow.durable)
        end, unsure = durable, False
        while True:
            yield
            try:
                if not self.claimed:
                    end = self.folder.claim(self.beginning, end)
                    self.claimed, unsure = True, False
                elif unsure:
                    end, unsure = self.folder.look_again(), False
                elif end < self.flow.last:
                    upto, unsure = self.world.rng.randint(end + 1, self.flow.last), True
                    rows = [(self.flow.incarnation, e) for e in range(end + 1, upto + 1) if e % 3]
                    batch = pa.record_batch(
                        list(zip(*rows, strict=True)) or [[], []], schema=SCHEMA
                    )
                    end, unsure = self.folder.publish([batch], SCHEMA, upto), False
                else:
                    if self.closes:
                        self.folder.close(SCHEMA)
                        self.closed = True
                    return
                self.flow.durable.append(max(end, self.flow.durable[-1]))
            except StagingGone:
                self.claimed, self.beginning = False, Beginning.TAKE_OVER
            except OSError:
                if not self.claimed and self.beginning is not Beginning.TAKE_OVER:
                    raise  # whoever starts the flow is told


# --- the world -----------------------------------------------------------------------------------


class World:
    def __init__(self, rng: random.Random, failures: float) -> None:
        self.rng, self.failures = rng, failures
        self.memory = Memory()
        self.writers: list[Writer] = []
        self.lineage: list[FlowModel] = []
        """The flows whose rows the folder has, one after another."""
        self.names = 0
        self.seen: dict[str, bytes] = {}
        self.start(Beginning.FIRST)

    @property
    def flow(self) -> FlowModel:
        return self.lineage[-1]

    def start(self, beginning: Beginning) -> None:
        """Another flow; or the same one again, in place of a writer that did not get to write."""
        self.names += 1
        base = self.flow.last if self.lineage else -1
        self.lineage.append(FlowModel(f"i{self.names}", base))
        self.writers.append(Writer(self, self.flow, beginning))

    def take_over(self) -> None:
        self.writers.append(Writer(self, self.flow, Beginning.TAKE_OVER))

    def act(self) -> None:
        closed = any(w.closed and w.flow is self.flow for w in self.writers)
        at = self.rng.random()
        if closed and self.rng.random() < 0.1:
            self.next_flow()
        elif at < 0.95:
            alive = [w for w in self.writers if not w.over] or self.writers
            self.rng.choice([*alive, alive[-1]]).step()
        elif at < 0.97 and not closed:
            self.take_over()
        elif at < 0.99:
            self.rng.choice(self.writers).kill()
        elif at < 0.993:
            self.lose_power()
        self.check()

    def next_flow(self) -> None:
        """A flow that has not got to the folder yet could take it from one that has written
        nothing there: those must be gone. All others may be."""
        for writer in self.writers:
            if not writer.claimed:
                writer.kill()
        if self.rng.random() < 0.6:
            self.stop_and_resume()
        else:
            self.empty_and_restart()

    def lose_power(self) -> None:
        for writer in self.writers:
            writer.kill()
        self.memory.lose_power(self.rng)
        shown = self.memory.visible()  # a name that was not synced may be gone
        self.seen = {n: data for n, data in self.seen.items() if n in shown}
        self.take_over()

    def stop_and_resume(self) -> None:
        """Those writers of the old flow that are left would write on, if they could."""
        self.start(Beginning.AFTER_STOP)
        self.lineage[-2].last += 3

    def empty_and_restart(self) -> None:
        old = self.flow
        self.memory.root = Folder()
        self.lineage, self.seen = [], {}
        self.start(Beginning.FIRST)
        old.last += 3

    def expected(self, epoch: int) -> str:
        """Whose rows an epoch has."""
        return next(f.incarnation for f in reversed(self.lineage) if epoch > f.base)

    def check(self) -> None:
        """What readers see now."""
        shown = self.memory.visible()
        shown.pop("part-empty.parquet", None)
        for name, data in self.seen.items():
            assert shown.get(name) == data, f"{name} was removed, or changed"
        following = 0
        for name in sorted(shown):
            if name not in self.seen:
                self.check_file(name, shown[name])
            said = pq.read_metadata(io.BytesIO(shown[name])).metadata
            assert int(said[b"holdfast.first_epoch"]) == following, "ranges overlap, or miss some"
            following = int(said[b"holdfast.last_epoch"]) + 1
        self.seen = shown
        assert following > self.flow.durable[-1], "what was durable is lost"

    def check_file(self, name: str, data: bytes) -> None:
        table = pq.read_table(io.BytesIO(data))
        said = pq.read_metadata(io.BytesIO(data)).metadata
        first, last = (int(said[b"holdfast." + n]) for n in (b"first_epoch", b"last_epoch"))
        rows = list(zip(*(table[n].to_pylist() for n in SCHEMA.names), strict=True))
        assert rows == [(self.expected(e), e) for e in range(first, last + 1) if e % 3], name

    def end(self) -> None:
        """Nothing fails any more: whoever leads next gets everything there, and those that wake
        up change nothing."""
        self.failures = 0.0
        leader = Writer(self, self.flow, Beginning.TAKE_OVER)
        leader.closes = True
        while not leader.over:
            leader.step()
            self.check()
        assert leader.error is None and leader.closed, leader.error
        assert self.flow.durable[-1] == self.flow.last
        for writer in self.writers:
            while not writer.over:
                writer.step()
                self.check()
        assert "_SUCCESS" in self.memory.folder(OUT).now
        for writer in self.writers:
            allowed = (Overtaken, HoldfastError, OSError, type(None))
            assert isinstance(writer.error, allowed), writer.error
            of_now = writer.flow is self.flow
            assert not (of_now and isinstance(writer.error, HoldfastError)), writer.error

    def close(self) -> None:
        for writer in self.writers:
            writer.kill()


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=True), st.sampled_from([0.0, 0.03, 0.2]))
def test_readers_see_each_epoch_once_whatever_writers_do(
    rng: random.Random, failures: float
) -> None:
    world = World(rng, failures)
    try:
        for _ in range(rng.randint(20, 400)):
            world.act()
        world.end()
    finally:
        world.close()
