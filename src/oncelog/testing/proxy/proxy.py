"""The proxy: stands between clients and the brokers of a cluster and does what its rules say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from oncelog.errors import ConfigError, MisuseError
from oncelog.runtime.loop_thread import LoopThread
from oncelog.testing.proxy.events import EventLog, WireEvent
from oncelog.testing.proxy.in_flight import Address, Held, Streams
from oncelog.testing.proxy.relay import Relay
from oncelog.testing.proxy.rules import Rule, RuleBook


def parse_address(text: str) -> Address:
    """`host:port` (IPv6 in brackets). Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r} is no HOST:PORT")
    return host.strip("[]"), int(port)


class Proxy:
    """A TCP proxy that understands Kafka's frames, in a thread of its own; a context manager.

    Every broker that an answer names gets a listening port of the proxy, opened when it is first
    named, so clients that bootstrap here never pass it by. Carries plain-text connections; the
    requests of SASL pass, TLS does not. `advertised_host` is what clients are told, default `host`.
    """

    def __init__(
        self,
        upstream: str,
        *,
        rules: Sequence[Rule] = (),
        seed: int = 0,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised_host: str | None = None,
        on_event: Callable[[WireEvent], None] | None = None,
    ) -> None:
        self._core = _Core(host, advertised_host or host, RuleBook(rules, seed), EventLog(on_event=on_event))
        self._upstream = parse_address(upstream)
        self._host, self._port = host, port
        self._thread: LoopThread | None = None
        self._address: Address | None = None

    def start(self) -> Self:
        """Listen; returns itself. Raises OSError when the port is taken."""
        if self._thread is None:
            self._thread = LoopThread("oncelog-proxy")
            try:
                self._address = self._thread.run(self._core.listen(self._upstream, self._port))
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """Close every connection and port; held messages are lost. Events stay readable."""
        if self._thread is not None:
            self._thread.run(self._core.close())
            self._thread.stop()
            self._thread = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def bootstrap_servers(self) -> str:
        """`host:port` for clients. Raises MisuseError before start()."""
        if self._address is None:
            raise MisuseError("the proxy is not started: use it in a with statement, or call start()")
        return f"{self._address[0]}:{self._address[1]}"

    @property
    def port(self) -> int:
        """The port of `bootstrap_servers`."""
        return int(self.bootstrap_servers.rpartition(":")[2])

    @property
    def events(self) -> list[WireEvent]:
        """Everything that crossed so far, in order."""
        return self._core.log.snapshot()

    def add(self, rule: Rule) -> None:
        """Put a rule in force, after those there; its counting starts now."""
        self._core.book.add(rule)

    def clear(self) -> None:
        """Drop all rules; what is held stays held."""
        self._core.book.clear()

    def note(self, text: str) -> None:
        """Put a remark between the events."""
        self._core.log.note(text)

    def wait_until(self, predicate: Callable[[Sequence[WireEvent]], bool], timeout: float = 10.0) -> bool:
        """Block until `predicate(events)` holds, at most `timeout` seconds; whether it did."""
        return self._core.log.wait_until(predicate, timeout)

    def release(self, *, lose: bool = False) -> int:
        """Let all held messages go on (`lose`: lose them; an answer takes its connection along).

        Returns how many there were.
        """
        return self._run(self._core.release(lose))

    def cut(self) -> int:
        """End all client connections now; returns how many there were."""
        return self._run(self._core.cut())

    def _run(self, coroutine: Coroutine[Any, Any, int]) -> int:
        if self._thread is None:
            coroutine.close()
            raise MisuseError("the proxy is not running: use it in a with statement, or call start()")
        return self._thread.run(coroutine)


class _Core:
    """The part that lives on the loop: ports by broker, relays, held messages."""

    def __init__(self, host: str, advertised_host: str, book: RuleBook, log: EventLog) -> None:
        self.book, self.log = book, log
        self.held: list[Held] = []
        self._host, self._advertised_host = host, advertised_host
        self._servers: dict[Address, asyncio.Server] = {}
        self._opening = asyncio.Lock()
        self._relays: set[Relay] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connection_count = 0

    async def listen(self, upstream: Address, port: int) -> Address:
        """Open the port that stands for the broker `upstream`."""
        self._servers[upstream] = await asyncio.start_server(self._accept_for(upstream), self._host, port)
        return await self.address_for(*upstream)

    async def address_for(self, host: str, port: int) -> Address:
        """Where clients reach the broker `host:port`; opens the port when it is new."""
        upstream = (host, port)
        async with self._opening:
            if upstream not in self._servers:
                accept = self._accept_for(upstream)
                self._servers[upstream] = await asyncio.start_server(accept, self._host, 0)
        return self._advertised_host, int(self._servers[upstream].sockets[0].getsockname()[1])

    def _accept_for(self, upstream: Address) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._connection_count += 1
            self.spawn(self._serve(self._connection_count, upstream, (reader, writer)))

        return accept

    async def _serve(self, number: int, upstream: Address, client: Streams) -> None:
        try:
            broker = await asyncio.open_connection(*upstream)
        except OSError as error:
            reason = error.strerror or error
            self.log.note(f"no broker at {upstream[0]}:{upstream[1]}: {reason}")
            client[1].close()
            return
        relay = Relay(self, number, upstream, client, broker)
        self._relays.add(relay)
        try:
            await relay.run()
        finally:
            self._relays.discard(relay)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task that outlives its relay."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def release(self, lose: bool) -> int:
        """Release or lose everything held."""
        waiting = [held for held in self.held if not held.is_done]
        self.held.clear()
        for held in waiting:
            held.release(lose)
        return len(waiting)

    async def cut(self) -> int:
        """End all client connections."""
        relays = tuple(self._relays)
        for relay in relays:
            relay.cut()
        return len(relays)

    async def close(self) -> None:
        """Close ports and connections and wait for it: a loop must not end with open handles."""
        servers, relays = tuple(self._servers.values()), tuple(self._relays)
        for server in servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(relay.abort() for relay in relays))
        await asyncio.gather(*(server.wait_closed() for server in servers))
        self._servers.clear()
