"""The arbiter in a real ZooKeeper: the contract, and what only a server on its own can do."""

import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from kazoo.security import OPEN_ACL_UNSAFE, make_digest_acl_credential

from holdfast.arbiter import Arbiter, Entry, arbiter
from holdfast.arbiter.zookeeper import ZooKeeperArbiter
from holdfast.errors import ArbiterAway, FlowError, HostError, Superseded
from holdfast.lab.chaos.zookeeper import ZooKeeperServer
from tests.support.arbiter_contract import (
    Contract,
    ContractBetweenProcesses,
    MakeParty,
    eventually,
    led,
)
from tests.support.certificates import Authority, Certificate
from tests.support.secure_zookeeper import SaslZooKeeper, SecureZooKeeper
from tests.support.starts_contract import StartsContract


@pytest.fixture
def url(server: ZooKeeperServer) -> Iterator[str]:
    yield server.url
    # The tests between processes all call their flow "flow".
    client = KazooClient(f"127.0.0.1:{server.port}")
    client.start()
    client.delete("/holdfast", recursive=True)
    client.stop()
    client.close()


@pytest.fixture
def party(url: str) -> Iterator[MakeParty]:
    flow, made = f"flow/{uuid.uuid4()}", []

    def make() -> Arbiter:
        made.append(arbiter(url, flow, 2.0))
        return made[-1]

    yield make
    for one in made:
        one.close()


def end_session(party: Arbiter) -> None:
    """Close the session from a second connection; the server then tells the first."""
    assert isinstance(party, ZooKeeperArbiter)
    identity = party._client.client_id
    intruder = KazooClient(party.hosts, client_id=identity)
    intruder.start()
    intruder.stop()
    intruder.close()


class TestZooKeeper(Contract, ContractBetweenProcesses):
    @pytest.fixture
    def party(self, party: MakeParty) -> MakeParty:
        return party

    def expire(self, leader: Arbiter) -> None:
        end_session(leader)


class TestZooKeeperStarts(StartsContract):
    @pytest.fixture
    def url(self, url: str) -> str:
        return url


def test_a_session_that_ended_is_noticed_without_a_pause(party: MakeParty) -> None:
    a = party()
    entry = a.commit(led(a, "a"), b"view")
    end_session(a)
    assert not a.renew(entry)
    assert a.read() == entry


def test_who_closes_is_followed_at_once(party: MakeParty) -> None:
    a, b = party(), party()
    led(a, "a")
    a.close()
    assert led(b, "b").term == 2
    with pytest.raises(ArbiterAway):
        a.read()


def calls(party: Arbiter, entry: Entry) -> list[Callable[[], object]]:
    return [
        party.read,
        lambda: party.lead("a"),
        lambda: party.commit(entry, b"after"),
        lambda: party.renew(entry),
        lambda: party.resign(entry),
    ]


def test_a_server_that_is_killed_and_comes_back(party: MakeParty, server: ZooKeeperServer) -> None:
    a, b = party(), party()
    entry = a.commit(led(a, "a"), b"before")
    server.kill()
    try:
        for call in calls(a, entry):
            begin = time.monotonic()
            with pytest.raises(ArbiterAway, match="at zk://"):
                call()
            assert time.monotonic() - begin < 2
    finally:
        server.start()
    assert eventually(a.read) == entry
    go_on(a, entry)
    assert eventually(b.read).value == b"after"


def test_a_server_that_is_stopped_and_wakes(party: MakeParty, server: ZooKeeperServer) -> None:
    a = party()
    entry = led(a, "a")
    server.signal(signal.SIGSTOP)
    try:
        for call in calls(a, entry)[:3]:
            begin = time.monotonic()
            with pytest.raises(ArbiterAway):
                call()
            assert time.monotonic() - begin < 2
    finally:
        server.signal(signal.SIGCONT)
    latest = eventually(a.read)
    assert latest in (entry, Entry(2, 1, "a", b"after"))
    go_on(a, entry)
    assert eventually(a.read).value == b"after"


def go_on(leader: Arbiter, entry: Entry) -> None:
    """Commit after an outage. The session may have outlived it or not; what was committed has."""
    try:
        # Whether an earlier commit went through or not, saying it again makes it so, once.
        again = eventually(lambda: leader.commit(entry, b"after"))
        assert again == Entry(entry.version + 1, entry.term, entry.holder, b"after")
    except Superseded:
        assert not eventually(lambda: leader.renew(entry))
        new = eventually(lambda: leader.lead(entry.holder))
        assert new is not None and new.term == entry.term + 1
        eventually(lambda: leader.commit(new, b"after"))


@pytest.mark.parametrize("what", ["lead", "commit"])
def test_an_answer_that_got_lost(
    party: MakeParty, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    a, b = party(), party()
    assert isinstance(a, ZooKeeperArbiter)
    act = {"lead": lambda: a.lead("a"), "commit": lambda: a.commit(Entry(1, 1, "a"), b"view")}
    if what == "commit":
        led(a, "a")
    transact = a._transact

    def transact_unheard(*args: object) -> bool:
        transact(*args)  # type: ignore[arg-type]
        raise ArbiterAway(where="here", cause="the answer got lost")

    with monkeypatch.context() as patch:
        patch.setattr(a, "_transact", transact_unheard)
        with pytest.raises(ArbiterAway):
            act[what]()
    assert b.lead("b") is None
    assert act[what]() == b.read()
    assert a.renew(b.read())


def test_who_asks_while_another_comes_and_goes(
    party: MakeParty, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = party(), party()
    read = a.read

    def read_then_sleep() -> Entry:
        entry = read()
        b.resign(b.commit(led(b, "b"), b"view"))
        return entry

    with monkeypatch.context() as patch:
        patch.setattr(a, "read", read_then_sleep)
        assert a.lead("a") is None
    assert led(a, "a") == Entry(3, 2, "a", b"view")


def test_who_resigns_too_late_does_not_depose_the_next(
    party: MakeParty, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = party(), party()
    old = led(a, "a")
    read = a.read

    def read_then_sleep() -> Entry:
        entry = read()
        end_session(a)
        led(b, "b")
        return entry

    with monkeypatch.context() as patch:
        patch.setattr(a, "read", read_then_sleep)
        a.resign(old)
    assert b.renew(b.read())


def test_a_server_that_was_never_there(server: ZooKeeperServer) -> None:
    away = arbiter("zk://127.0.0.1:1", "flow", 1)
    for call in (away.read, lambda: away.lead("a")):
        begin = time.monotonic()
        with pytest.raises(ArbiterAway):
            call()
        assert time.monotonic() - begin < 2
    begin = time.monotonic()
    away.close()
    assert time.monotonic() - begin < 2


# --- who may --------------------------------------------------------------------------------------


@pytest.fixture
def stranger(server: ZooKeeperServer) -> Iterator[KazooClient]:
    client = KazooClient(f"127.0.0.1:{server.port}")
    client.start()
    yield client
    client.stop()
    client.close()


@pytest.fixture
def auth_file(tmp_path: Path) -> Path:
    file = tmp_path / "auth"
    file.write_text("flow:its password\n")
    return file


@pytest.fixture
def owned(server: ZooKeeperServer, auth_file: Path) -> Iterator[MakeParty]:
    """Parties that have credentials. What they leave only they can remove."""
    flow, made = f"flow/{uuid.uuid4()}", []

    def make() -> Arbiter:
        made.append(arbiter(f"{server.url}?auth_file={auth_file}", flow, 2.0))
        return made[-1]

    yield make
    client = KazooClient(
        f"127.0.0.1:{server.port}", auth_data=[("digest", auth_file.read_text().strip())]
    )
    client.start()
    client.delete(made[0]._root, recursive=True)
    client.stop()
    client.close()
    for one in made:
        one.close()


def test_only_who_has_the_credentials_reads_or_changes_the_entry(
    owned: MakeParty, stranger: KazooClient
) -> None:
    a, b = owned(), owned()
    assert isinstance(a, ZooKeeperArbiter)
    entry = a.commit(led(a, "a"), b"a view")
    assert b.read() == entry
    acts = [
        lambda: stranger.get(a._entry),
        lambda: stranger.set(a._entry, b"mine"),
        lambda: stranger.delete(a._entry),
        lambda: stranger.delete(a._leader),
        lambda: stranger.create(f"{a._root}/other", b""),
        lambda: stranger.set_acls(a._entry, OPEN_ACL_UNSAFE),
        lambda: stranger.get(a._leader),
    ]
    for act in acts:
        with pytest.raises(NoAuthError):
            act()
    assert b.read() == entry and a.renew(entry)
    a.resign(entry)
    assert led(b, "b").term == entry.term + 1


@pytest.mark.parametrize("credentials", [None, "flow:another password"])
def test_an_entry_of_another_user_is_named_in_the_error(
    owned: MakeParty, server: ZooKeeperServer, tmp_path: Path, credentials: str | None
) -> None:
    a = owned()
    a.commit(led(a, "a"), b"a view")
    query = ""
    if credentials is not None:
        (tmp_path / "wrong").write_text(credentials)
        query = f"?auth_file={tmp_path / 'wrong'}"
    b = arbiter(server.url + query, a.flow, 2.0)
    for call in (b.read, lambda: b.lead("b")):
        with pytest.raises(HostError, match=r"may not use /holdfast/flow%2F.*"):
            eventually(call)
    b.close()


def test_an_entry_that_anybody_could_have_changed_is_refused(
    url: str, auth_file: Path, stranger: KazooClient
) -> None:
    flow = f"flow/{uuid.uuid4()}"
    plain = arbiter(url, flow, 2.0)
    plain.commit(led(plain, "a"), b"a view")
    careful = arbiter(f"{url}?auth_file={auth_file}", flow, 2.0)
    for call in (careful.read, lambda: careful.lead("b")):
        with pytest.raises(HostError, match="is open to world:anyone"):
            eventually(call)
    for one in (plain, careful):
        one.close()


def test_permissions_that_are_given_are_used(
    url: str, monkeypatch: pytest.MonkeyPatch, stranger: KazooClient
) -> None:
    monkeypatch.setenv("HOLDFAST_ZOOKEEPER_AUTH", "flow:its password")
    own = quote(make_digest_acl_credential("flow", "its password"))
    a = arbiter(f"{url}?acl=digest:{own}:cdrwa,world:anyone:r", f"flow/{uuid.uuid4()}", 2.0)
    assert isinstance(a, ZooKeeperArbiter)
    a.commit(led(a, "a"), b"a view")
    assert stranger.get(a._entry)[0].endswith(b"a view")
    with pytest.raises(NoAuthError):
        stranger.set(a._entry, b"mine")
    for path in (a._leader, a._entry, a._root):
        a._client.delete(path)
    a.close()


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("?auth_file=/nowhere/auth", "/nowhere/auth, which cannot be read"),
        ("?cert=/etc/hostname", "no ca"),
        ("?password=x", "unknown settings: password"),
        ("?acl=everybody", "is no permission"),
        ("?scheme=kerberos", "scheme=kerberos: there are digest and sasl"),
        ("?scheme=sasl", "no credentials"),
    ],
)
def test_settings_that_are_wrong_are_named(query: str, said: str) -> None:
    with pytest.raises(FlowError, match=said):
        arbiter(f"zk://127.0.0.1:1{query}", "flow", 1)


def test_tls_with_certificates_of_both_sides(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    client, server = authority.sign("client"), SecureZooKeeper(tmp_path, authority)
    stranger = Authority(tmp_path / "other").sign("client")
    server.start()
    made: list[Arbiter] = []

    def party(cert: Certificate | None, ca: Path = authority.cert) -> Arbiter:
        own = f"&cert={cert.cert}&key={cert.key}" if cert is not None else ""
        made.append(arbiter(f"zk://localhost:{server.secure_port}?ca={ca}{own}", "flow", 2.0))
        return made[-1]

    try:
        a = party(client)
        entry = eventually(lambda: a.commit(led(a, "a"), b"a view"))
        assert party(client).read() == entry
        untrusted = party(client, ca=tmp_path / "other" / "ca.pem")
        for unknown in (party(stranger), party(None), untrusted):
            with pytest.raises(ArbiterAway):
                unknown.read()
        # The entry is the certificate's: another client on the same server may not read it.
        plain = arbiter(server.url, "flow", 2.0)
        made.append(plain)
        with pytest.raises(HostError, match="may not use"):
            eventually(plain.read)
    finally:
        for one in made:
            one.close()
        server.kill()


# --- SASL -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sasl_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SaslZooKeeper]:
    users = {"flow": "its password", "other": "another password"}
    server = SaslZooKeeper(tmp_path_factory.mktemp("sasl"), users)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def sasl_party(sasl_server: SaslZooKeeper, tmp_path: Path) -> Iterator[Callable[..., Arbiter]]:
    flow, made = f"flow/{uuid.uuid4()}", []

    def make(credentials: str = "flow:its password") -> Arbiter:
        file = tmp_path / credentials.replace(":", "-")
        file.write_text(credentials)
        made.append(arbiter(f"{sasl_server.url}?auth_file={file}&scheme=sasl", flow, 2.0))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_an_entry_of_a_sasl_user_is_its_own(
    sasl_party: Callable[..., Arbiter], sasl_server: SaslZooKeeper
) -> None:
    a, b = sasl_party(), sasl_party()
    assert isinstance(a, ZooKeeperArbiter)
    entry = eventually(lambda: a.commit(led(a, "a"), b"a view"))
    assert b.read() == entry
    acls, _ = a._client.get_acls(a._entry)
    assert [(one.id.scheme, one.id.id) for one in acls] == [("sasl", "flow")]
    nobody = arbiter(sasl_server.url, a.flow, 2.0)
    for stranger in (sasl_party("other:another password"), nobody):
        for call in (stranger.read, lambda s=stranger: s.lead("s")):  # type: ignore[misc]
            with pytest.raises(HostError, match="may not use /holdfast/flow"):
                eventually(call)
    nobody.close()
    a.resign(entry)
    assert led(b, "b").term == entry.term + 1


def test_a_password_that_is_wrong_is_said(sasl_party: Callable[..., Arbiter]) -> None:
    wrong = sasl_party("flow:a wrong password")
    for call in (wrong.read, lambda: wrong.lead("a")):
        with pytest.raises(HostError, match="does not accept the credentials"):
            eventually(call)


def test_a_server_with_sasl_that_is_killed_and_comes_back(
    sasl_party: Callable[..., Arbiter], sasl_server: SaslZooKeeper
) -> None:
    a = sasl_party()
    entry = eventually(lambda: a.commit(led(a, "a"), b"before"))
    sasl_server.kill()
    with pytest.raises(ArbiterAway):
        a.read()
    sasl_server.start()
    assert eventually(a.read) == entry
    go_on(a, entry)


def test_a_server_that_is_lost_while_it_checks_a_password_has_not_refused_it(
    sasl_server: SaslZooKeeper, auth_file: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        greeter = threading.Thread(target=_greet_and_hang_up, args=(listener, sasl_server.port))
        greeter.start()
        url = f"zk://127.0.0.1:{listener.getsockname()[1]}?auth_file={auth_file}&scheme=sasl"
        party = arbiter(url, f"flow/{uuid.uuid4()}", 2.0)
        greeter.join()
    assert isinstance(party, ZooKeeperArbiter)
    party._client.set_hosts(f"127.0.0.1:{sasl_server.port}")
    assert eventually(party.read) == Entry()
    party.close()


def _greet_and_hang_up(listener: socket.socket, port: int) -> None:
    """Let a client have a session, and close its connection when it begins to authenticate."""
    client, _ = listener.accept()
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        server.sendall(client.recv(1 << 16))
        client.sendall(server.recv(1 << 16))
        assert client.recv(1 << 16)
