"""Hostile clients for `oncelog bench hostile`: many connections of one kind, open until the process is
killed.

`python -m oncelog_bench.attacks JSON` reads an AttackSpec and opens its connections. It prints `ready` as
soon as all of them have begun the attack. If the broker closes a connection that is idle or slow, the attack
opens a new one.
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
"""The request size, in bytes, that a slow-loris connection announces."""
TURNS_PER_S = 20
FETCHES = 50
MAX_FETCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class AttackSpec:
    """The parameters of an attack.

    `kind` selects what each connection does. IDLE: nothing. SLOW_LORIS: send one byte of a request per
    second. NEVER_READS: send FETCHES fetch requests, and never read a response.
    """

    bootstrap_servers: str
    kind: str
    connections: int
    topic: str


@contextlib.contextmanager
def attacked(spec: AttackSpec) -> Iterator[None]:
    """Run the attack in a separate process for the `with` block. Raises OncelogError if it cannot begin."""
    command = [sys.executable, "-m", "oncelog_bench.attacks", json.dumps(asdict(spec))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise OncelogError(f"the attack ({spec.kind}) could not begin")
        yield
    finally:
        process.kill()
        process.communicate()


def attack(spec: AttackSpec) -> None:
    """Attack until the process is killed. Never return."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    opening = _opening(spec)
    clients = [_begin(spec, opening) for _ in range(spec.connections)]
    print("ready", flush=True)
    position, portion = 0, -(-spec.connections // TURNS_PER_S)
    while True:
        began = time.monotonic()
        for _ in range(portion):
            index = position % spec.connections
            position += 1
            if not _continue_attack(clients[index], spec.kind):
                clients[index].close()
                with contextlib.suppress(OSError):
                    clients[index] = _begin(spec, opening)
        time.sleep(max(0.0, 1 / TURNS_PER_S - (time.monotonic() - began)))


def _opening(spec: AttackSpec) -> bytes:
    if spec.kind == IDLE:
        return b""
    if spec.kind == SLOW_LORIS:
        return struct.pack(">ihhih", CLAIMED_BYTES, 0, 9, 1, -1)
    part = FetchRequest.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=MAX_FETCH_BYTES)
    topic = FetchRequest.FetchTopic(topic=spec.topic, partitions=[part])
    request = FetchRequest(max_wait_ms=0, min_bytes=1, max_bytes=MAX_FETCH_BYTES, topics=[topic])
    return encode_request(request, 12, 0, CLIENT_ID) * FETCHES


def _begin(spec: AttackSpec, opening: bytes) -> socket.socket:
    client = connect(spec.bootstrap_servers)
    with contextlib.suppress(OSError):
        client.sendall(opening)
    client.setblocking(False)
    return client


def _continue_attack(client: socket.socket, kind: str) -> bool:
    """Send the next bytes of this kind of attack. Return False if the broker has closed the connection.

    For NEVER_READS, always return True: a connection that never reads cannot notice that it was closed.
    """
    try:
        if kind == SLOW_LORIS:
            client.send(b"\0")
        return kind == NEVER_READS or client.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


if __name__ == "__main__":
    attack(AttackSpec(**json.loads(sys.argv[1])))
