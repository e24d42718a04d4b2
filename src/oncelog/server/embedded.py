"""A complete broker: its state on a real disk, a clock and a server.

`Broker` runs a broker in a thread of this process. `run_foreground` is the code of `oncelog serve`. Both
raise StorageError if another process has locked the data directory.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import shutil
import signal
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from oncelog.broker.append_events import AppendEvent
from oncelog.broker.metrics import to_dict
from oncelog.broker.settings.listeners import Listener, address_text, parse_listeners
from oncelog.broker.state import BrokerState
from oncelog.config import BROKER
from oncelog.errors import ConfigError, MisuseError, StorageError
from oncelog.limits import DEFAULT_LIMITS, Limits
from oncelog.log.disk import Disk, explain
from oncelog.log.manager import LOCK, LogManager
from oncelog.runtime import system
from oncelog.runtime.clock import Clock
from oncelog.runtime.event_log import log_event
from oncelog.runtime.loop_thread import LoopThread, close_loop, new_event_loop
from oncelog.runtime.tls import uses_sasl, uses_tls
from oncelog.server.allocator import tune_allocator
from oncelog.server.background import BackgroundRunner
from oncelog.server.disk import RealDisk
from oncelog.server.gc_tuner import GcTuner
from oncelog.server.listener import Listen, listen
from oncelog.server.metrics_http import MetricsServer, metrics_token
from oncelog.server.server import Server
from oncelog.settings import Settings

START_SECONDS = 60.0
METRICS_HOST = "127.0.0.1"


class RunningBroker:
    """A broker with its Kafka and metrics servers, on the event loop that called `start`.

    `metrics`: host and port of the metrics endpoint; None for no endpoint.
    """

    def __init__(
        self,
        node: BrokerState,
        clock: Clock,
        listeners: Sequence[Listener],
        metrics: tuple[str, int] | None = None,
        listen: Listen = listen,
    ) -> None:
        self.node, self.clock = node, clock
        self.server = Server(node, clock, listeners, listen)
        self.background = BackgroundRunner(node.log_manager.background, self.server.after_work)
        self.metrics_server = MetricsServer(node, *metrics) if metrics is not None else None

    @property
    def listeners(self) -> tuple[Listener, ...]:
        """The listeners with the ports to which they are bound."""
        return tuple(acceptor.listener for acceptor in self.server.acceptors)

    async def start(self) -> None:
        """Open all listeners. If an address cannot be bound, close the log and raise StorageError."""
        self.background.start()
        try:
            await self.server.start()
            if self.metrics_server is not None:
                await self.metrics_server.start()
        except StorageError:
            await self.stop()
            raise
        self.node.log_manager.remove_deleted()
        topic_count = len(self.node.topics)
        for listener in self.listeners:
            log_event(
                "info",
                "listening",
                name=listener.name,
                host=listener.host,
                port=listener.port,
                topics=topic_count,
            )

    async def stop(self, *, keeps_data: bool = True) -> None:
        """Close all connections, then the log.

        Closing the log writes its snapshots and the clean-shutdown marker, and syncs the partitions that have
        unsynced records. Without `keeps_data`, the files are only closed, because the caller removes them.
        """
        if self.metrics_server is not None:
            await self.metrics_server.stop()
        await self.server.stop()
        await self.background.stop()
        if keeps_data:
            self.node.close(self.clock.now_ms())
        else:
            self.node.release()
        log_event("info", "stopped", port=self.listeners[0].port)


def checked_listeners(settings: Settings) -> tuple[Listener, ...]:
    """Return the listeners of the settings.

    Beyond loopback, raises ConfigError for a listener that has no authentication, or that would receive
    passwords or tokens in clear text. `oncelog.insecure` allows both.
    """
    listeners = parse_listeners(settings, socket.gethostname())
    for listener in listeners:
        if not settings["oncelog.insecure"] and not is_loopback(listener.host):
            _check_authenticated(listener)
    return listeners


def _check_authenticated(listener: Listener) -> None:
    settings = listener.settings
    readable = {"PLAIN", "OAUTHBEARER"} & set(settings["sasl.enabled.mechanisms"])
    if uses_sasl(settings) and not uses_tls(settings) and readable:
        reason = f"{' and '.join(sorted(readable))} would send secrets in clear text; use SASL_SSL"
    elif uses_sasl(settings) or (uses_tls(settings) and settings["ssl.client.auth"] == "required"):
        return
    else:
        reason = "anybody could connect; use SASL_SSL, or SSL with ssl.client.auth=required"
    raise ConfigError(
        f"listening on {listener.host or 'every interface'} ({listener.name}) with "
        f"security.protocol={settings['security.protocol']}: {reason} (docs/security.md), {_OR_INSECURE}"
    )


_OR_INSECURE = "or use --insecure (oncelog.insecure=true) in a network that keeps others out"


def check_metrics(host: str, settings: Settings) -> None:
    """Raise ConfigError if a metrics endpoint on `host` would have an empty token, or be unprotected.

    Beyond loopback, the endpoint needs a token unless `oncelog.insecure` is set.
    """
    token = metrics_token(settings)
    if not (is_loopback(host) or token or settings["oncelog.insecure"]):
        raise ConfigError(
            f"metrics on {host or 'every interface'}: anybody could read them; set oncelog.metrics.token "
            f"(docs/security.md), {_OR_INSECURE}"
        )


def is_loopback(host: str) -> bool:
    """Return True if only this computer can connect to the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_node(
    data_dir: Path, settings: Settings, clock: Clock, on_append: Callable[[AppendEvent], None] | None = None
) -> BrokerState:
    """Lock a data directory and recover its log.

    Raises StorageError, for example if another process has locked the directory.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        disk = RealDisk(data_dir)
    except OSError as error:
        # Only these errors of mkdir mean that the given path is wrong. All others mean that the disk has a
        # problem.
        is_wrong_path = isinstance(error, (FileNotFoundError, NotADirectoryError, FileExistsError))
        hint = "; set another directory with --data-dir or ONCELOG_DATA_DIR" if is_wrong_path else ""
        raise StorageError(f"data directory {data_dir} cannot be used: {explain(error)}{hint}") from error
    node = recover_node(disk, settings, clock, on_append)
    _log_opening(data_dir, node)
    return node


def _log_opening(data_dir: Path, node: BrokerState) -> None:
    """Log the state of the log after recovery, and every repair."""
    is_clean, partitions = node.log_manager.was_clean, node.log_manager.partitions
    log_event("info", "data directory opened", path=data_dir, clean=is_clean, partitions=len(partitions))
    for note in node.takeover_notes:
        log_event("warning", "directory taken over", what=note)
    for tp, partition in partitions.items():
        for report in partition.recovery_warnings:
            log_event("warning", "log repaired", partition=tp, what=report)
    for coordinator in (node.transactions, node.groups):
        for damage in coordinator.topic.damaged.values():
            log_event(
                "error",
                "coordinator's partition damaged",
                partition=damage.topic_partition,
                file=damage.file,
                offset=damage.offset,
                reason=damage.reason,
                remedy="docs/operations.md#a-damaged-coordinators-partition",
            )


def recover_node(
    disk: Disk,
    settings: Settings,
    clock: Clock,
    on_append: Callable[[AppendEvent], None] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> BrokerState:
    """Recover a broker from `disk`, which may be a simulated disk. Raises StorageError.

    `limits`: the broker's internal limits (`oncelog.limits`). Tests pass small limits.
    """
    now_ms, new_uuid = clock.now_ms(), system.current().new_uuid
    manager = LogManager.open(
        disk, node_id=settings["node.id"], new_uuid=new_uuid, now_ms=now_ms, limits=limits
    )
    try:
        node = BrokerState(manager, settings, new_uuid=new_uuid, now_ms=now_ms, on_append=on_append)
        node.clock_lead_ms = clock.lead_ms
        return node
    except BaseException as error:
        # Also after an OSError, such as a missing permission. Without the mark of a clean stop, the next
        # start would not notice that files were lost or replaced. See
        # test_a_start_without_permission_leaves_the_mark_of_a_clean_stop.
        with suppress(OSError):
            manager.give_back()
        manager.release()
        if isinstance(error, OSError):
            raise StorageError(f"{manager.directory} cannot be opened: {explain(error)}") from error
        raise


@contextmanager
def held_data_dir(data_dir: Path) -> Iterator[RealDisk]:
    """Lock a data directory for the length of the `with` block.

    Raises StorageError if a broker has the directory open.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        disk = RealDisk(data_dir)
        lock = disk.lock(LOCK)
    except BlockingIOError:
        raise StorageError(f"data directory {data_dir} is in use; stop its broker first") from None
    except OSError as error:
        raise StorageError(f"data directory {data_dir} cannot be used: {explain(error)}") from error
    try:
        yield disk
    finally:
        lock.release()


class Broker:
    """A broker that runs in a thread of this process. Use it as a context manager.

    If `data_dir` is None, the broker uses a temporary directory, which `stop` removes. If `port` is 0, it
    chooses a free port, and keeps it when it is stopped and started again. `config` has Kafka's broker keys.
    If it contains `listeners`, `host` and `port` are ignored. `metrics_port` opens the metrics endpoint on
    loopback. `on_append` is called in the broker's thread with the result of every batch in a Produce
    request.

    The constructor raises ConfigError. `start` raises StorageError.
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        config: Mapping[str, object] | None = None,
        *,
        metrics_port: int | None = None,
        on_append: Callable[[AppendEvent], None] | None = None,
    ) -> None:
        self._settings = BROKER.parse({"listeners": address_text(host, port), **(config or {})})
        self._listeners = checked_listeners(self._settings)
        self._is_temporary = data_dir is None
        # Only `start` creates the temporary directory. A broker that never runs leaves no directory behind.
        self.data_dir = Path(data_dir) if data_dir is not None else _temporary_name()
        self._metrics = None if metrics_port is None else (METRICS_HOST, metrics_port)
        self._on_append = on_append
        self._running: RunningBroker | None = None
        self._thread: LoopThread | None = None
        self._process_id = os.getpid()
        """The process that called `start`; before the first start, the process that created this object."""

    def start(self) -> Self:
        """Open the data directory and listen.

        Raises StorageError, and MisuseError if the broker runs already.
        """
        if self._running is not None:
            raise MisuseError("the broker is running; stop it before starting it again")
        if self._process_id != os.getpid():
            # This object was copied by a fork, so choose a new temporary directory: the other process may use
            # the old one, and a failed start would remove it. See
            # test_a_broker_made_before_a_fork_gets_a_directory_in_each_process.
            self._process_id = os.getpid()
            self.data_dir = _temporary_name() if self._is_temporary else self.data_dir
        try:
            if self._is_temporary:
                self.data_dir.mkdir(mode=0o700, exist_ok=True)
            self._run()
        except BaseException:
            self._remove_temporary()
            raise
        return self

    def _run(self) -> None:
        clock = Clock()
        node = open_node(self.data_dir, self._settings, clock, self._on_append)
        thread = LoopThread("oncelog-broker")
        try:
            running = thread.run(_start(node, clock, self._listeners, self._metrics), START_SECONDS)
        except BaseException:
            thread.stop()
            raise
        self._running, self._thread, self._listeners = running, thread, running.listeners

    def _remove_temporary(self) -> None:
        if self._is_temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def stop(self) -> None:
        """Stop the broker cleanly. May be called more than once.

        There is no time limit, because a clean stop syncs every partition that has changed, and a busy disk
        may need minutes for thousands of them. The files of a temporary directory are removed without a sync.
        In a forked child this does nothing: the broker runs in the parent.
        """
        # Do nothing in a forked child. Otherwise a child that leaves a `with` block would remove the
        # directory of the running broker. See test_a_forked_child_leaves_the_broker_of_its_parent_alone.
        if self._process_id != os.getpid():
            return
        if self._running is not None and self._thread is not None:
            running, self._running = self._running, None
            try:
                self._thread.run(running.stop(keeps_data=not self._is_temporary))
            finally:
                self._thread.stop()
        self._remove_temporary()

    def __enter__(self) -> Self:
        return self if self._running is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def host(self) -> str:
        """The host of the first listener."""
        return self._listeners[0].host

    @property
    def port(self) -> int:
        """The port of the first listener; 0 before the first start if a free port was requested."""
        return self._listeners[0].port

    @property
    def metrics_port(self) -> int | None:
        """The port of the metrics endpoint; None if there is no endpoint."""
        server = self._running.metrics_server if self._running else None
        return server.port if server else None

    @property
    def bootstrap_servers(self) -> str:
        """The value of bootstrap.servers for clients of the first listener."""
        return self._listeners[0].bootstrap_servers

    @property
    def listeners(self) -> dict[str, str]:
        """The value of bootstrap.servers for each listener, by listener name."""
        return {listener.name: listener.bootstrap_servers for listener in self._listeners}

    def metrics(self) -> dict[str, float]:
        """Return the counters since `start` and the current gauges.

        The keys are the names in Prometheus without `oncelog_` and `_total`, and with a dot before a label's
        value. Requests by API are `requests.<Api>` and `request_seconds.<Api>`. Raises MisuseError if the
        broker is not running.
        """
        if self._running is None or self._thread is None:
            raise MisuseError("the broker is not running; it has metrics only while it runs")
        return self._thread.run(_metrics(self._running.node), START_SECONDS)


def _temporary_name() -> Path:
    return Path(tempfile.gettempdir()) / f"oncelog-{uuid.uuid4().hex[:12]}"


async def _start(
    node: BrokerState, clock: Clock, listeners: Sequence[Listener], metrics: tuple[str, int] | None
) -> RunningBroker:
    try:
        running = RunningBroker(node, clock, listeners, metrics)
    # The constructor of Server raises ConfigError, for example for an invalid certificate.
    except ConfigError:
        node.close(clock.now_ms())
        raise
    await running.start()
    return running


async def _metrics(node: BrokerState) -> dict[str, float]:
    return to_dict(node.metrics, node.gauges())


def run_foreground(
    data_dir: Path,
    settings: Settings,
    *,
    metrics: tuple[str, int] | None = None,
    on_ready: Callable[[Sequence[Listener], int | None], None],
) -> None:
    """Run a broker in this thread until SIGTERM, SIGINT or SIGHUP.

    `on_ready(listeners, metrics port)` is called when the broker listens. Raises ConfigError and
    StorageError.
    """
    listeners = checked_listeners(settings)
    if metrics is not None:
        check_metrics(metrics[0], settings)
    tune_allocator()
    clock = Clock()
    node = open_node(data_dir, settings, clock)
    GcTuner().install()

    async def serve() -> None:
        stopped = asyncio.Event()
        numbers = [signal.SIGTERM, signal.SIGINT]
        # nohup makes a process ignore SIGHUP. In that case the signal must stay ignored.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        running = await _start(node, clock, listeners, metrics)
        try:
            on_ready(running.listeners, running.metrics_server.port if running.metrics_server else None)
            await stopped.wait()
        finally:
            await running.stop()

    loop = new_event_loop()
    try:
        loop.run_until_complete(serve())
    finally:
        close_loop(loop)
