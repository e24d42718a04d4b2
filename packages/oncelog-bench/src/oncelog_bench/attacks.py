"""Hostile clients for `oncelog bench hostile`: many connections of one kind, kept up until the process ends.

`python -m oncelog_bench.attacks JSON` reads an AttackOrder, prints `ready` when every connection was made and
has begun, and goes on; a connection that the broker closes is made again.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from oncelog.errors import OncelogError
from oncelog.wire.frames import encode_request
from oncelog.wire.messages import FetchRequest
from oncelog_bench.raw_wire import CLIENT_ID, connect

IDLE, SLOW_LORIS, NEVER_READS = "idle", "slow-loris", "never reads"
CLAIMED_BYTES = 100_000
"""What the size prefix of a slow-loris says is coming."""
TURNS_PER_S = 20
FETCHES = 50
MAX_FETCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class AttackOrder:
    """`kind`: connections that do nothing; that send a byte a second of a request; that ask for the topic's
    data again and again and read no answer."""

    bootstrap_servers: str
    kind: str
    connections: int
    topic: str


@contextlib.contextmanager
def attacked(order: AttackOrder) -> Iterator[None]:
    """The attack runs in a process of its own. Raises OncelogError when it cannot begin."""
    command = [sys.executable, "-m", "oncelog_bench.attacks", json.dumps(asdict(order))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise OncelogError(f"the attack ({order.kind}) did not begin")
        yield
    finally:
        process.kill()
        process.communicate()


def attack(order: AttackOrder) -> None:
    """Never returns."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opening = _opening(order)
    clients = [_begin(order, opening) for _ in range(order.connections)]
    print("ready", flush=True)
    position, portion = 0, -(-order.connections // TURNS_PER_S)
    while True:
        began = time.monotonic()
        for _ in range(portion):
            index = position % order.connections
            position += 1
            if not _goes_on(clients[index], order.kind):
                clients[index].close()
                with contextlib.suppress(OSError):
                    clients[index] = _begin(order, opening)
        time.sleep(max(0.0, 1 / TURNS_PER_S - (time.monotonic() - began)))


def _opening(order: AttackOrder) -> bytes:
    if order.kind == IDLE:
        return b""
    if order.kind == SLOW_LORIS:
        return struct.pack(">ihhih", CLAIMED_BYTES, 0, 9, 1, -1)
    part = FetchRequest.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=MAX_FETCH_BYTES)
    topic = FetchRequest.FetchTopic(topic=order.topic, partitions=[part])
    request = FetchRequest(max_wait_ms=0, min_bytes=1, max_bytes=MAX_FETCH_BYTES, topics=[topic])
    return encode_request(request, 12, 0, CLIENT_ID) * FETCHES


def _begin(order: AttackOrder, opening: bytes) -> socket.socket:
    client = connect(order.bootstrap_servers)
    with contextlib.suppress(OSError):
        client.sendall(opening)
    client.setblocking(False)
    return client


def _goes_on(client: socket.socket, kind: str) -> bool:
    """Send what its kind sends now; False when the broker has closed it."""
    try:
        if kind == SLOW_LORIS:
            client.send(b"\0")
        return kind == NEVER_READS or client.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    attack(AttackOrder(**json.loads(sys.argv[1])))
