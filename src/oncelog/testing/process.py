"""Starts, watches and stops server processes on this computer."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from random import SystemRandom
from types import FrameType

from oncelog.errors import OncelogError, TimedOut

STOP_TIMEOUT_S = 30.0
READY_TIMEOUT_S = 120.0
_SERVER_PORTS = range(20_000, 32_768)


def end_process(process: subprocess.Popen[bytes] | None, signal_number: signal.Signals) -> None:
    """Send a signal to a process and wait for its end. Do nothing if `process` is None.

    Kill the process if it is still running after STOP_TIMEOUT_S.
    """
    if process is None:
        return
    process.send_signal(signal_number)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def free_ports(count: int) -> list[int]:
    """Return ports that are currently free on loopback.

    They are below the ephemeral ports that the system uses for outgoing connections. Otherwise a connection
    could take the port of a node while the node is restarted. Raises OSError if too few ports are free.
    """
    ports: list[int] = []
    with ExitStack() as bound:
        for port in _ports_in_random_order():
            if len(ports) == count:
                return ports
            probe = bound.enter_context(socket.socket())
            # If the port is in use (OSError), try the next one.
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
    raise OSError(f"fewer than {count} ports from {_SERVER_PORTS[0]} to {_SERVER_PORTS[-1]} are free")


def _ports_in_random_order() -> Iterator[int]:
    """Yield all server ports, some of them twice. The first ones are drawn alone: all of them take 20 ms."""
    draw = SystemRandom()
    yield from draw.sample(_SERVER_PORTS, 64)
    yield from draw.sample(_SERVER_PORTS, len(_SERVER_PORTS))


def are_free(ports: Iterable[int]) -> bool:
    """Return True if no process listens on any of these ports on loopback."""
    for port in ports:
        with socket.socket() as probe:
            # Set this option as servers do, because connections of an earlier server may be in TIME_WAIT.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


@contextmanager
def deferring_interrupt() -> Iterator[None]:
    """Defer SIGINT (Ctrl-C) to the end of the `with` block. Works in the main thread only.

    At the end, the signal's handler is called. The signal is not blocked, because a process that is started
    in the block would inherit the signal mask.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[FrameType | None] = []
    handler = signal.signal(signal.SIGINT, lambda _, frame: received.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received and callable(handler):
            handler(signal.SIGINT, received[0])


def dying_with_parent() -> list[str]:
    """Return words to put before a command, so that the command's process is killed when the thread that
    started it ends.

    Return an empty list if setpriv is not installed.
    """
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


class NodeProcess:
    """One process of a cluster. It keeps its port and its directory when it is restarted.

    `mark`: a text in its command line that no other process's command line contains. The node inherits the
    environment of this process, with `environment` added. `page`: the address of the node's web page, if it
    has one. `ready_path`: a path on its port where it answers a GET with status 200 once it serves requests.
    By default, the node is ready as soon as it accepts connections.
    """

    def __init__(
        self,
        name: int | str,
        port: int,
        log_file: Path,
        command: list[str],
        *,
        mark: str,
        environment: Mapping[str, str] | None = None,
        page: str = "",
        ready_path: str = "",
    ) -> None:
        self.name, self.port, self.log_file, self.mark, self.page = name, port, log_file, mark, page
        self._ready_path = ready_path
        self._command, self._environment = command, {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Process id of the running node. Raises OncelogError if the node is not running."""
        if self._process is None:
            raise OncelogError(f"node {self.name} is not running")
        return self._process.pid

    def launch(self) -> None:
        """Start the process. Call `wait_until_ready` before you use it."""
        # Without the deferral, an interrupt between the start and the assignment would leave a process
        # without an owner.
        with self.log_file.open("ab") as log, deferring_interrupt():
            # Start a new session, so that Ctrl-C in a terminal reaches only this process and not the node.
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until the node is ready.

        After READY_TIMEOUT_S, or if the node has ended, kills it and raises TimedOut with the end of its log.
        """
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            if self._is_ready():
                return
            time.sleep(0.1)
        text = self.log_file.read_text(errors="replace")[-2000:]
        self.kill()
        raise TimedOut(f"node {self.name} did not start; {self.log_file} ends:\n{text}")

    def _is_ready(self) -> bool:
        if not self._ready_path:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=STOP_TIMEOUT_S)
        with closing(connection):
            try:
                connection.request("GET", self._ready_path)
                return connection.getresponse().status == http.HTTPStatus.OK
            except (OSError, http.client.HTTPException):
                return False

    def start(self) -> None:
        self.launch()
        self.wait_until_ready()

    def stop(self) -> None:
        """Stop the node with SIGTERM. Kill it if it is still running after STOP_TIMEOUT_S."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, signal_number: signal.Signals) -> None:
        end_process(self._process, signal_number)
        # Do this last, so that an interrupted stop can be repeated.
        self._process = None
