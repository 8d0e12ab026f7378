"""The connection of agents and driver: who is admitted, what a stranger costs, and what a lost driver loses."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from megascale.core.errors import ConfigError, Exit
from megascale.core.network import LOOPBACK, reserve_port, reserve_port_as
from megascale.operate.channel import driver_server, streams
from megascale.operate.channel.agent_channel import AgentChannel
from megascale.operate.channel.driver_server import DriverServer
from megascale.operate.channel.ends import Disconnected
from megascale.operate.channel.handshake import CHALLENGE_BYTES, ClientHandshake, NotAPeerError, Session
from megascale.operate.channel.messages import Check, Heartbeat, Hello, Leave, Stop, to_json
from megascale.operate.channel.streams import HELLO_KEY, METHOD, TLS_VARIABLES, Tls, tls_from_environment

SECRET = secrets.token_bytes(32)


def hello(node: str = "n0", started: float = 1.0, run: str = "") -> Hello:
    return Hello(node, "host", LOOPBACK, 2, run=run, started=started)


def channel(server: DriverServer, secret: bytes = SECRET, tls: Tls | None = None, **said: Any) -> AgentChannel:
    return AgentChannel(server.address, secret, lambda: [hello(**said)], tls)


async def soon(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, 20)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(bounded())


def test_messages_arrive_in_order_in_both_directions() -> None:
    async def test() -> None:
        async with DriverServer(SECRET) as server, channel(server) as agent:
            assert await soon(anext(server)) == ("n0", hello())
            beats = [Heartbeat(float(i)) for i in range(100)]
            assert all(agent.send(beat) for beat in beats)
            assert [await soon(anext(server)) for _ in beats] == [("n0", beat) for beat in beats]
            orders = [Stop(1, 0.5), Check(3, "gemm", {"size": [64, 64], "name": None})]
            assert all(server.send("n0", order) for order in orders)
            assert [await soon(anext(agent)) for _ in orders] == orders
            assert server.agents == {"n0"}
            assert not server.send("n1", Leave("another node"))

    run(test)


def test_a_lost_driver_is_noticed_and_the_next_one_taken() -> None:
    """The port is kept meanwhile: nobody else gets it."""

    async def test() -> None:
        with reserve_port() as reserved:
            port = reserved.getsockname()[1]
            async with AgentChannel(f"{LOOPBACK}:{port}", SECRET, lambda: [hello()]) as agent:
                async with DriverServer(SECRET, port=port) as server:
                    await soon(anext(server))
                    assert agent.lost_s == 0
                await asyncio.sleep(0.2)
                assert agent.lost_s > 0
                assert not agent.send(Heartbeat(1.0))
                async with DriverServer(SECRET, port=port) as server:
                    assert await soon(anext(server)) == ("n0", hello())
                    assert agent.send(Heartbeat(2.0))
                    assert await soon(anext(server)) == ("n0", Heartbeat(2.0))

    run(test)


def test_a_host_whose_own_name_is_loopback_is_reached_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes 127.0.1.1 to /etc/hosts, and other hosts look up another address."""
    found = {"node0": "127.0.1.1", "node1": "192.0.2.7", "localhost": LOOPBACK, LOOPBACK: LOOPBACK}
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port, type: [(type, 0, 0, "", (found[name], port))])
    listens = {}
    for name in found:
        reserved, host = reserve_port_as(name)
        with reserved:
            listens[name] = (host, reserved.getsockname()[0])
    everywhere = ("", "0.0.0.0")
    assert listens == {
        "node0": everywhere,
        "node1": everywhere,  # this host does not have that address
        "localhost": (LOOPBACK, LOOPBACK),
        LOOPBACK: (LOOPBACK, LOOPBACK),
    }


def test_a_lost_agent_is_noticed() -> None:
    async def test() -> None:
        async with DriverServer(SECRET) as server:
            async with channel(server):
                await soon(anext(server))
            node, notice = await soon(anext(server))
            assert node == "n0"
            assert isinstance(notice, Disconnected)
            assert not server.agents

    run(test)


def test_the_latest_agent_of_a_node_counts() -> None:
    """An earlier one, such as one that was cut off, is told to leave, and does not take the place back."""

    async def test() -> None:
        async with DriverServer(SECRET) as server, channel(server, started=1.0) as early:
            await soon(anext(server))
            async with channel(server, started=2.0) as late:
                assert await soon(anext(server)) == ("n0", hello(started=2.0))
                assert await soon(anext(early)) == Leave("a later agent of node n0 has joined")
                assert late.lost_s == 0

    run(test)


def test_an_observer_of_another_run_is_turned_away(capfd: pytest.CaptureFixture[str]) -> None:
    """The observer of this run on the same node keeps its connection."""

    async def test() -> None:
        async with DriverServer(SECRET, run="two") as server, channel(server, run="two") as ours:
            assert await soon(anext(server)) == ("n0", hello(run="two"))
            async with channel(server, started=2.0, run="one") as other:
                told = await soon(anext(other))
                assert isinstance(told, Leave)
                assert told.status == Exit.CONFIG
                assert told.reason.startswith("this driver watches run two, not one  -> give each run a port")
            assert ours.send(Heartbeat(3.0))
            assert await soon(anext(server)) == ("n0", Heartbeat(3.0))

    run(test)
    assert "node n0 was turned away: it watches run one, this driver run two" in capfd.readouterr().err


@contextlib.asynccontextmanager
async def call(server: DriverServer, metadata: bytes | None) -> AsyncIterator[Any]:
    """A call as a stranger makes it."""
    async with grpc.aio.insecure_channel(server.address, options=streams.CLIENT_OPTIONS) as raw:
        yield raw.stream_stream(METHOD)(metadata=() if metadata is None else ((HELLO_KEY, metadata),))


async def refusal(server: DriverServer, metadata: bytes | None, *messages: bytes) -> tuple[bytes, str]:
    """What a stranger gets: the server's messages, and the code at the end.

    The first message is written after the server's first: gRPC reports a call that ended under a write as INTERNAL,
    and forgets what the server had sent.
    """
    received = b""
    async with call(server, metadata) as stream:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (part := await soon(stream.read())) is not grpc.aio.EOF:
                received += part
                for message in messages:
                    await stream.write(message)
                messages = ()
        return received, (await soon(stream.code())).name


def test_a_stranger_gets_no_answer_and_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with DriverServer(SECRET) as server:
            wrong = ClientHandshake(secrets.token_bytes(32), streams.PURPOSE).hello
            purpose = ClientHandshake(SECRET, "another").hello
            for number, metadata in enumerate((None, b"", b"x" * 64, wrong, purpose), 1):
                assert await refusal(server, metadata) == (b"", "UNAUTHENTICATED")
                assert server.refused == number
            # an overheard hello gets a challenge, which its thief cannot answer
            overheard = ClientHandshake(SECRET, streams.PURPOSE).hello
            answer, code = await refusal(server, overheard, b"\0" * 32)
            assert (len(answer), code) == (64, "UNAUTHENTICATED")
            with pytest.raises(NotAPeerError, match="another secret"):
                async with channel(server, secrets.token_bytes(32)) as agent:
                    await soon(anext(agent))
            assert server.refused == 7
            assert not server.agents

    run(test)
    text = capfd.readouterr().err
    assert text.count("without the job's secret was refused at the job's driver") == 1
    assert SECRET.hex() not in text


def test_a_silent_stranger_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_server, "ADMISSION_S", 0.2)

    async def test() -> None:
        async with DriverServer(SECRET) as server:
            answer, code = await refusal(server, ClientHandshake(SECRET, streams.PURPOSE).hello)
            assert (len(answer), code) == (64, "UNAUTHENTICATED")
            raw = socket.create_connection((LOOPBACK, server.port))
            raw.sendall(b"GET / HTTP/1.0\r\n\r\n")
            raw.settimeout(20)
            received = await asyncio.to_thread(read_all, raw)
            assert b"n0" not in received
            async with channel(server):
                assert await soon(anext(server)) == ("n0", hello())

    run(test)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with connection, contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            received += part
    return received


def test_a_crowd_with_overheard_hellos_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_server, "MOST_STRANGERS", 3)
    overheard = ClientHandshake(SECRET, streams.PURPOSE).hello

    async def test() -> None:
        async with DriverServer(SECRET) as server, contextlib.AsyncExitStack() as held:
            for _ in range(3):
                stream = await held.enter_async_context(call(server, overheard))
                assert len(await soon(stream.read())) == 64
            assert await refusal(server, overheard) == (b"", "RESOURCE_EXHAUSTED")

    run(test)


ATTACKS: dict[str, Callable[[Session], list[bytes]]] = {
    "changed": lambda session: [session.sent.seal(to_json(Heartbeat(1.0))).replace(b"1.0", b"2.0")],
    "replayed": lambda session: [session.sent.seal(to_json(Heartbeat(1.0)))] * 2,
    "unsealed": lambda session: [to_json(Heartbeat(1.0))],
    "too short": lambda session: [b"\0"],
    "too long": lambda session: [b"\0" * (streams.MAX_MESSAGE_BYTES + 1024)],
    "an unknown field": lambda session: [session.sent.seal(b'Heartbeat {"time": 1.0, "colour": "red"}')],
    "the driver's message": lambda session: [session.sent.seal(to_json(Leave("now")))],
}


@contextlib.asynccontextmanager
async def joined(server: DriverServer) -> AsyncIterator[tuple[Any, Session]]:
    """A call that has proved the secret and said hello, and its seals."""
    handshake = ClientHandshake(SECRET, streams.PURPOSE)
    async with call(server, handshake.hello) as stream:
        proof, session = handshake.answer(await soon(stream.read()))
        await stream.write(proof)
        await stream.write(session.sent.seal(to_json(hello())))
        yield stream, session


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_bad_message_ends_the_connection(attack: str) -> None:
    async def test() -> None:
        async with DriverServer(SECRET) as server, joined(server) as (stream, session):
            assert await soon(anext(server)) == ("n0", hello())
            with contextlib.suppress(grpc.aio.AioRpcError):
                for message in ATTACKS[attack](session):
                    await stream.write(message)
            if attack == "replayed":
                assert await soon(anext(server)) == ("n0", Heartbeat(1.0))
            _, notice = await soon(anext(server))
            assert isinstance(notice, Disconnected), notice
            assert not server.agents

    run(test)


def test_an_impostor_driver_gets_no_proof() -> None:
    """A server that does not know the secret answers an agent: the agent neither proves nor says anything."""
    received: list[object] = []

    async def serve(requests: object, context: Any) -> None:
        await context.write(secrets.token_bytes(CHALLENGE_BYTES))
        received.append(await context.read())

    async def test() -> None:
        server = grpc.aio.server()
        service, method = METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(serve)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        port = server.add_insecure_port(f"{LOOPBACK}:0")
        await server.start()
        with pytest.raises(NotAPeerError, match="does not know the job's secret"):
            async with AgentChannel(f"{LOOPBACK}:{port}", SECRET, lambda: [hello()]) as agent:
                await soon(anext(agent))
        await server.stop(None)

    run(test)
    assert not [message for message in received if isinstance(message, bytes)]


def test_an_agent_that_takes_no_messages_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver neither waits for it nor keeps messages without bound."""
    monkeypatch.setattr(driver_server, "OUTBOX_MESSAGES", 4)

    async def test() -> None:
        async with DriverServer(SECRET) as server, joined(server):
            await soon(anext(server))
            sent = 0
            while server.send("n0", Leave("x" * 100_000)):
                sent += 1
                assert sent < 10_000
                await asyncio.sleep(0)
            _, notice = await soon(anext(server))
            assert isinstance(notice, Disconnected)

    run(test)


def certificates(folder: Path) -> Tls:
    """An authority, and a certificate for loopback that it signed."""
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    now = datetime.datetime.now(datetime.UTC)

    def certificate(subject: str, public: Any, *, is_authority: bool) -> bytes:
        names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (subject, "authority")]
        builder = (
            x509.CertificateBuilder(names[1], names[0], public, x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        address = x509.IPAddress(ipaddress.ip_address(LOOPBACK))
        builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    authority = certificate("authority", authority_key.public_key(), is_authority=True)
    texts = (certificate("node", key.public_key(), is_authority=False), private, authority)
    env = {}
    for name, text in zip(TLS_VARIABLES, texts, strict=True):
        (folder / name).write_bytes(text)
        env[name] = str(folder / name)
    found = tls_from_environment(env)
    assert found is not None
    return found


def test_tls_encrypts_and_refuses_whoever_has_no_certificate(tmp_path: Path) -> None:
    ours = certificates(tmp_path)
    (tmp_path / "other").mkdir()
    theirs = certificates(tmp_path / "other")

    async def test() -> None:
        async with DriverServer(SECRET, tls=ours) as server:
            async with channel(server, tls=ours) as agent:
                assert await soon(anext(server)) == ("n0", hello())
                assert server.send("n0", Leave("now"))
                assert await soon(anext(agent)) == Leave("now")
            await soon(anext(server))
            for tls in (None, theirs):
                async with channel(server, tls=tls) as agent:
                    await asyncio.sleep(0.5)
                    assert agent.connections == 0
            assert not server.agents

    run(test)


def test_tls_is_all_or_nothing(tmp_path: Path) -> None:
    assert tls_from_environment({}) is None
    with pytest.raises(ConfigError, match=f"{TLS_VARIABLES[1]}: not set"):
        certificates(tmp_path)
        tls_from_environment({TLS_VARIABLES[0]: str(tmp_path / TLS_VARIABLES[0])})
    with pytest.raises(ConfigError, match="No such file"):
        tls_from_environment(dict.fromkeys(TLS_VARIABLES, str(tmp_path / "absent")))


def test_a_driver_on_a_taken_port_says_so() -> None:
    async def test() -> None:
        with socket.create_server((LOOPBACK, 0)) as taken, pytest.raises(OSError, match="cannot listen at"):
            async with DriverServer(SECRET, port=taken.getsockname()[1]):
                pass

    run(test)
