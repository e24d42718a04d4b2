"""Reads commands from standard input for a client, and writes replies. The commands are listed in program.py
of `oncelog_devtools.client_matrix`.

A client is an object with the methods of `Client`, blocking or asyncio.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, Protocol

READ_LIMIT_S = 100.0


class Failed(Exception):
    """An error of the client whose text already names it."""


class Missing(Exception):
    """The client does not offer this. The text says why."""


class Client(Protocol):
    """The calls of one client. Each may return an awaitable."""

    version: str

    def producer(self, kind: str, argument: str) -> Any: ...
    def send(self, topic: str, partition: int, value: str, done: Callable[[object], None]) -> Any: ...
    def flush(self, seconds: float) -> Any: ...
    def begin(self) -> Any: ...
    def commit(self) -> Any: ...
    def abort(self) -> Any: ...
    def offsets(self, topic: str, offset: int) -> Any: ...
    def subscribe(self, topic: str, group: str, isolation: str, protocol: str, instance: str) -> Any: ...
    def poll(self) -> Any: ...
    def close(self) -> Any: ...


async def _result(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _plain(error: object) -> str:
    text = " ".join(str(error).split())[:200]
    is_named = isinstance(error, BaseException) and not isinstance(error, Failed)
    return f"{type(error).__name__}: {text}" if is_named else text


class Commands:
    """The state behind the commands: the result of each record, and the task that sends in order."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.results: dict[str, str] = {}
        self.sending: asyncio.Task[None] | None = None

    async def run(self, name: str, arguments: list[str]) -> list[str]:
        match name, arguments:
            case "version", []:
                return ["ok", self.client.version]
            case "producer", [kind, *rest]:
                await _result(self.client.producer(kind, rest[0] if rest else ""))
            case "send", [topic, partition, *values]:
                self.results |= dict.fromkeys(values, "pending")
                self.sending = asyncio.create_task(self._send(self.sending, topic, int(partition), values))
                await asyncio.sleep(0)
            case "flush", [seconds]:
                return await self._flush(float(seconds))
            case "consume", [topic, group, count, *settings]:
                await _result(self.client.subscribe(topic, group, *settings))
                return ["records", *await self._read(int(count))]
            case "offsets", [topic, offset]:
                await _result(self.client.offsets(topic, int(offset)))
            case (("begin" | "commit" | "abort" | "close"), []):
                if self.sending:
                    await self.sending
                await _result(getattr(self.client, name)())
            case _:
                raise ValueError(f"no command {name}")
        return ["ok"]

    async def _send(
        self, earlier: asyncio.Task[None] | None, topic: str, partition: int, values: list[str]
    ) -> None:
        if earlier:
            await earlier
        for value in values:
            try:
                await _result(self.client.send(topic, partition, value, self._done(value)))
            except Exception as error:
                self.results[value] = _plain(error)

    def _done(self, value: str) -> Callable[[object], None]:
        def done(error: object) -> None:
            self.results[value] = _plain(error) if error else "ok"

        return done

    async def _flush(self, seconds: float) -> list[str]:
        try:
            async with asyncio.timeout(seconds):
                if self.sending:
                    await asyncio.shield(self.sending)
                await _result(self.client.flush(seconds))
                while "pending" in self.results.values():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pass  # the results say which records are pending
        fields = [f"{value}={result}" for value, result in self.results.items()]
        self.results = {value: result for value, result in self.results.items() if result == "pending"}
        return ["results", *fields]

    async def _read(self, count: int) -> list[str]:
        values: list[str] = []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + READ_LIMIT_S
        while len(values) < count and loop.time() < deadline:
            values += [value.decode() for value in await _result(self.client.poll())]
        return values


async def _serve(make_client: Callable[[str], Client]) -> None:
    commands = Commands(make_client(sys.argv[1]))
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *arguments = line.split()
        try:
            reply = await commands.run(name, arguments)
        except Missing as reason:
            reply = ["missing", str(reason)]
        except Exception as error:
            reply = ["error", _plain(error)]
        print("\t".join(reply), flush=True)


def serve(make_client: Callable[[str], Client]) -> None:
    """Run the commands on standard input with the client that `make_client(bootstrap_servers)` returns."""
    asyncio.run(_serve(make_client))
    os._exit(0)  # an open transaction stays open, as after a crash
