"""The proxy: a TCP server between clients and the brokers of a cluster.

It applies rules that inject faults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

from oncelog.errors import ConfigError, MisuseError
from oncelog.runtime.loop_thread import LoopThread
from oncelog.testing.proxy.events import Direction, EventLog, WireEvent
from oncelog.testing.proxy.in_flight import Address, HeldMessage, Streams
from oncelog.testing.proxy.relay import Relay
from oncelog.testing.proxy.rules import Action, Rule, RuleBook, RuleState


def parse_address(text: str) -> Address:
    """Return host and port of `host:port`; an IPv6 address is in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{text!r}: expected HOST:PORT")
    return host.strip("[]"), int(port)


class Proxy:
    """A fault-injecting proxy for Kafka's protocol, as a context manager. It runs in its own thread.

    When a response names a broker for the first time, the proxy opens a listening port for it. Clients that
    bootstrap at the proxy therefore never bypass it. Plaintext connections are supported, also with SASL, but
    not TLS.

    `advertised_host` replaces the brokers' host names in responses; the default is `host`. `on_event` is
    called with each event, in the proxy's thread or in the thread that calls `note`. The newest `max_events`
    events are kept. Raises ConfigError if `upstream` is not HOST:PORT.

    Methods such as `lose_ack` add a rule for a common fault, for batches of `topic` or, without it, of any
    topic. `nth` is the number of the first message that the fault hits, counted from the call; `count` is how
    many messages it hits. They return the rule's number for `remove`.
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
        max_events: int = 200_000,
    ) -> None:
        log = EventLog(max_events, on_event)
        self._core = _Core(host, advertised_host or host, RuleBook(rules, seed), log)
        self._upstream = parse_address(upstream)
        self._host, self._port = host, port
        self._thread: LoopThread | None = None
        self._address: Address | None = None

    def start(self) -> Self:
        """Listen, and return this object. Raises OSError if the port is in use."""
        if self._thread is None:
            self._thread = LoopThread("oncelog-proxy")
            try:
                self._address = self._thread.run(self._core.listen(self._upstream, self._port))
            except BaseException:
                self.stop()
                raise
        return self

    def stop(self) -> None:
        """Close all connections and ports. Held messages are lost. The events can still be read."""
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
        """The address for clients (`host:port`). Raises MisuseError before start()."""
        if self._address is None:
            raise MisuseError("the proxy is not started: use it in a with statement, or call start()")
        return f"{self._address[0]}:{self._address[1]}"

    @property
    def port(self) -> int:
        """The port in `bootstrap_servers`."""
        return int(self.bootstrap_servers.rpartition(":")[2])

    @property
    def events(self) -> list[WireEvent]:
        """The recorded events, in order."""
        return self._core.log.snapshot()

    @property
    def rules(self) -> list[RuleState]:
        """The rules with their counters, in the order in which they were added."""
        return self._core.book.states()

    def add(self, rule: Rule) -> int:
        """Append a rule, and return its number for `remove`. The rule counts matches from now on."""
        return self._core.book.add(rule)

    def remove(self, number: int) -> bool:
        """Remove the rule with this number. Return False if there is none. Held messages stay held."""
        return self._core.book.remove(number)

    def lose_ack(self, topic: str | None = None, *, nth: int = 1, count: int = 1) -> int:
        """Let the broker store batches, but cut the connection before their acknowledgements pass."""
        return self._fault(Action.CUT, topic, nth, count, direction=Direction.RESPONSE)

    def lose_request(self, topic: str | None = None, *, nth: int = 1, count: int = 1) -> int:
        """Cut the connection at Produce requests, before the broker gets them."""
        return self._fault(Action.CUT, topic, nth, count, direction=Direction.REQUEST)

    def repeat_request(self, topic: str | None = None, *, nth: int = 1, count: int = 1) -> int:
        """Send Produce requests to the broker twice."""
        return self._fault(Action.DUPLICATE, topic, nth, count)

    def reorder(self, topic: str | None = None, *, nth: int = 1, count: int = 1) -> int:
        """Hold each Produce request until the next one of its connection has passed."""
        return self._fault(Action.HOLD, topic, nth, count, release_after=1)

    def delay_acks(self, delay_ms: float, topic: str | None = None) -> int:
        """Delay the acknowledgements of all Produce requests; with `topic`, only those for this topic."""
        return self._fault(Action.DELAY, topic, None, None, direction=Direction.RESPONSE, delay_ms=delay_ms)

    def refuse(self, error: str, topic: str | None = None, *, nth: int = 1, count: int = 1) -> int:
        """Answer Produce requests with `error`, the name of a Kafka error. The broker does not get them."""
        return self._fault(Action.FAIL, topic, nth, count, error=error)

    def lose_commit_ack(self, *, nth: int = 1, count: int = 1) -> int:
        """Let the broker commit or abort transactions, but cut the connection before its responses pass."""
        rule = Rule(action=Action.CUT, api="EndTxn", direction=Direction.RESPONSE, nth=nth, count=count)
        return self.add(rule)

    def _fault(
        self, action: Action, topic: str | None, nth: int | None, count: int | None, **options: Any
    ) -> int:
        return self.add(Rule(action=action, api="Produce", topic=topic, nth=nth, count=count, **options))

    def clear(self) -> None:
        """Remove all rules. Messages that are held stay held."""
        self._core.book.clear()

    def note(self, text: str) -> None:
        """Add `text` to the recorded events, as a remark."""
        self._core.log.note(text)

    def wait_until(self, predicate: Callable[[Sequence[WireEvent]], bool], timeout: float = 10.0) -> bool:
        """Wait until `predicate(events)` is true, at most `timeout` seconds. Return the predicate's last
        result.
        """
        return self._core.log.wait_until(predicate, timeout)

    def release(self, *, lose: bool = False) -> int:
        """Release all held messages and return their number.

        If `lose` is True, the messages are lost instead of forwarded. A lost response ends its connection.
        """
        return self._run(self._core.release(lose))

    def cut(self) -> int:
        """Close all client connections now, and return their number."""
        return self._run(self._core.cut())

    def _run(self, coroutine: Coroutine[Any, Any, int]) -> int:
        if self._thread is None:
            coroutine.close()
            raise MisuseError("the proxy is not running: use it in a with statement, or call start()")
        return self._thread.run(coroutine)


class _Core:
    """The state of a proxy on its event loop: ports by broker, relays and held messages."""

    def __init__(self, host: str, advertised_host: str, book: RuleBook, log: EventLog) -> None:
        self.book, self.log = book, log
        self.held: list[HeldMessage] = []
        self._host, self._advertised_host = host, advertised_host
        self._servers: dict[Address, asyncio.Server] = {}
        self._opening = asyncio.Lock()
        self._relays: set[Relay] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connection_count = 0

    async def listen(self, upstream: Address, port: int) -> Address:
        """Open a port for the broker `upstream`, and return the port's address for clients."""
        self._servers[upstream] = await asyncio.start_server(self._accept_for(upstream), self._host, port)
        return await self.address_for(*upstream)

    async def address_for(self, host: str, port: int) -> Address:
        """Return the proxy's address for the broker `host:port`. Open a port if the broker is new."""
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
        # UnicodeError means that the host is not a valid name.
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
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
        """Run a task that may continue after its relay has ended."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def release(self, lose: bool) -> int:
        """Forward or lose all held messages, and return their number."""
        waiting = [held for held in self.held if not held.is_done]
        self.held.clear()
        for held in waiting:
            held.release(lose)
        return len(waiting)

    async def cut(self) -> int:
        """Close all client connections and return their number."""
        relays = tuple(self._relays)
        for relay in relays:
            relay.cut()
        return len(relays)

    async def close(self) -> None:
        """Close ports and connections, and wait until they are closed. The event loop must run until then."""
        servers, relays = tuple(self._servers.values()), tuple(self._relays)
        for server in servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(relay.abort() for relay in relays))
        await asyncio.gather(*(server.wait_closed() for server in servers))
        self._servers.clear()
