"""Run sequences on both brokers over real sockets."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from support.broker import RawClient
from support.groups.topics import wait_until_groups_know
from support.security.requests import log_in

from differential.compare import CLOSED, DONE, NO_ANSWER, NO_RESPONSE, Difference, Explained, Symbols, compare
from differential.references import Names, as_body, value_at
from differential.sequence import PASSWORD, RESTARTS, SENTINEL, Rule, Sequence, Step, restarts_of
from oncelog.broker.coordinators.internal_topic import java_hash
from oncelog.conform.topic_pool import wait_until_led
from oncelog.conform.values import ERROR_NAMES, build
from oncelog.errors import MemberIdRequired, OncelogError
from oncelog.wire.frames import decode_response, encode_request
from oncelog.wire.message import Part
from oncelog.wire.messages import API_BY_NAME, NO_ID

ANSWER_S = 20.0
"""Maximum wait for one response, in seconds."""
PATIENCE_S = 8.0
"""Maximum time in seconds for which a request is repeated after transient errors."""
READY_S = 120.0
"""Maximum wait for a started broker to answer, in seconds."""
CONFIRMATIONS = 3
"""Maximum number of times that a sequence with a difference is run again.

If no run shows the difference, it counts as not reproducible.
"""
CHUNK = 32
"""Number of sequences that run together: one request creates the topics of all, and one deletes them."""
PASSING = (
    "CONCURRENT_TRANSACTIONS", "COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR",
    "NOT_LEADER_OR_FOLLOWER",
)  # fmt: skip
ENDING = ("EndTxn", "InitProducerId")
"""APIs that end a transaction. The coordinator may complete it in the background after the response."""
SETTLING = ("PrepareCommit", "PrepareAbort", "PrepareEpochFence")
AT_ONCE = (*ENDING, "AddPartitionsToTxn", "AddOffsetsToTxn")
"""APIs whose requests are sent while a transaction is still completing.

They get CONCURRENT_TRANSACTIONS and are repeated. Before requests of all other APIs, the run waits for the
completion.
"""
CHANGING = (
    "CreateTopics", "DeleteTopics", "CreatePartitions", "IncrementalAlterConfigs", "AlterConfigs",
    "CreateAcls", "DeleteAcls", "AlterClientQuotas", "AlterUserScramCredentials",
)  # fmt: skip
"""APIs of changes that Kafka's controller acknowledges before the broker has applied them."""
PARKED = "no answer while others were asked"
LOGIN_REFUSED, LOGIN_PAUSE_S = "login refused", 0.3
PARK_S, LATE_S = 0.012, 8.0
"""Maximum waits in seconds: for the response to a request that may stay pending, and for a response that the
other broker has already sent.
"""
JAVA_BUCKETS = 16
"""Number of buckets of a java.util.HashMap that has at most 12 keys."""
_numbers = itertools.count()
_values = itertools.count(1_000_000)


class BrokerUnderTest(Protocol):
    """The interface of a broker under test: its addresses, and how to restart it."""

    @property
    def bootstrap_servers(self) -> str: ...
    @property
    def sasl_servers(self) -> str: ...
    def restart(self, *, kill: bool) -> None: ...


class Connection:
    """One connection of a run. The broker handles its requests in order. Some responses are read later."""

    def __init__(self, address: str, user: str = "") -> None:
        self._raw = RawClient(address)
        if user:
            log_in(self._raw, user, PASSWORD)
        self._raw.socket.settimeout(ANSWER_S)
        self._correlation_id = 0
        self.sent: list[tuple[int, Step]] = []
        """The numbers and steps whose responses have not been read, in order."""

    def send(self, step: Step, message: Any) -> None:
        """Write a request. Raises OSError."""
        self._correlation_id += 1
        self._raw.socket.sendall(encode_request(message, step.version, self._correlation_id, step.client_id))

    def read(self, step: Step) -> Any:
        """Return the next response, CLOSED or NO_ANSWER. Raises OSError or PeerError."""
        try:
            frame = self._raw.read_frame()
        except TimeoutError:
            return NO_ANSWER
        if frame is None:
            return CLOSED
        return decode_response(API_BY_NAME[step.api].response, step.version, frame)[1]

    def is_ready(self, seconds: float) -> bool:
        """Return True if a response or the end of the connection can be read. Wait up to `seconds` for
        that.
        """
        return bool(select.select([self._raw.socket], [], [], seconds)[0])

    def close(self) -> None:
        self._raw.socket.close()


class Run:
    """The state of one sequence on one broker."""

    def __init__(self, broker: BrokerUnderTest, names: Names) -> None:
        self._bed, self._names = broker, names
        self._symbols = Symbols(names.prefix, names.topic_ids, names.now_ms)
        self._connections: dict[str, Connection] = {}
        self._unsettled: set[str] = set()
        self._is_behind = False
        self.answers: list[Any] = []
        """The responses to all steps so far, in a comparable form."""
        self.parked: dict[int, tuple[Connection, Step]] = {}
        """Parked requests by the number of their step. Their responses may come after those of later
        steps.
        """

    def take(self, step: Step) -> None:
        """Run the next step. If the step parks, send its request and do not wait for the response."""
        self.answers.append(None)
        self.answers[-1] = self._step(step)

    def finish(self) -> None:
        """Read all responses that have not been read yet, except those of parked requests."""
        for connection in self._connections.values():
            self._read_outstanding(connection)

    def close(self) -> None:
        """Close all connections. The responses to parked requests are never read."""
        for connection, _ in self.parked.values():
            connection.close()
        self.parked.clear()
        for name in list(self._connections):
            self._drop(name)

    def unpark(self, place: int, is_answered: bool) -> None:
        """End a parked request: read its response if `is_answered`, and close its connection."""
        connection, step = self.parked.pop(place)
        if is_answered:
            connection.sent.append((place, step))
            self._read_outstanding(connection)
        connection.close()

    def _step(self, step: Step) -> Any:
        match step.kind:
            case "request":
                return self._request(step)
            case "pause":
                time.sleep(step.body["ms"] / 1000)
            case "close":
                self._drop(step.connection)
            case "restart" | "kill":
                self.finish()
                self.close()
        return DONE

    def _drop(self, name: str) -> None:
        if connection := self._connections.pop(name, None):
            connection.close()

    def _connection(self, name: str, user: str = "") -> Connection:
        if name not in self._connections:
            self._connections[name] = self._connect(user)
        return self._connections[name]

    def _connect(self, user: str) -> Connection:
        if user:
            if not self._bed.sasl_servers:
                raise OncelogError(f"{self._bed.bootstrap_servers} has no listener on which clients log in")
            own_name = f"{self._names.prefix}-{user}"
            try:
                return Connection(self._bed.sasl_servers, own_name)
            except AssertionError:  # `log_in` failed: Kafka learns of a new user only after a moment
                time.sleep(LOGIN_PAUSE_S)
                return Connection(self._bed.sasl_servers, own_name)
        return Connection(self._bed.bootstrap_servers)

    def _park(self, step: Step, message: Any) -> str:
        connection = self._connect(step.user)
        connection.send(step, message)
        self.parked[len(self.answers) - 1] = connection, step
        return PARKED

    def _catch_up(self) -> None:
        """Wait until the broker has applied all changes that this run has made so far.

        Kafka applies changes in order. So this makes one more change, to a setting, and waits until it is
        visible.
        """
        self._is_behind = False
        if SENTINEL not in self._names.topic_ids:
            return
        key, value, connection = "retention.ms", str(next(_values)), self._connection("catching up")
        resource = {"resource_type": 2, "resource_name": self._names.topic(SENTINEL)}
        setting = {"name": key, "config_operation": 0, "value": value}
        self._ask(
            connection, "IncrementalAlterConfigs", 1, {"resources": [resource | {"configs": [setting]}]}
        )
        question = {"resources": [resource | {"configuration_keys": [key]}]}
        deadline = time.monotonic() + READY_S
        while self._ask(connection, "DescribeConfigs", 4, question).results[0].configs[0].value != value:
            if time.monotonic() > deadline:
                raise OncelogError(f"{self._bed.bootstrap_servers} never learns of a setting")

    def _ask(self, connection: Connection, api: str, version: int, body: dict[str, Any]) -> Any:
        step = Step(api, version)
        connection.send(step, build(API_BY_NAME[api].request, body))
        return connection.read(step)

    def _request(self, step: Step) -> Any:
        if step.api in CHANGING:
            self._is_behind = True
        elif self._is_behind:
            self._catch_up()
        message = build(API_BY_NAME[step.api].request, self._names.resolve(step.body))
        if step.api not in AT_ONCE:
            self._settle()
        if step.api in ENDING and message.transactional_id:
            self._unsettled.add(message.transactional_id)
        try:
            return self._park(step, message) if step.parks else self._exchange(step, message)
        except AssertionError:  # the authentication in `log_in` failed
            return LOGIN_REFUSED
        except OSError:
            self._drop(step.connection)
            return CLOSED

    def _exchange(self, step: Step, message: Any) -> Any:
        connection = self._connection(step.connection, step.user)
        if not step.is_awaited:
            connection.send(step, message)
            connection.sent.append((len(self.answers) - 1, step))
            return NO_ANSWER
        self._read_outstanding(connection)
        deadline = time.monotonic() + PATIENCE_S
        pause_s = 0.002
        while True:
            connection.send(step, message)
            if getattr(message, "acks", None) == 0:
                return self._barrier(step, connection)
            answer = connection.read(step)
            if isinstance(answer, str):
                self._drop(step.connection)
                return answer
            errors = {ERROR_NAMES.get(code, str(code)) for code in error_codes(answer)}
            if not errors & {*(PASSING if step.passing is None else step.passing)}:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        self._bind(step, answer)
        return self._symbols.plain(answer, step.version)

    def _barrier(self, step: Step, connection: Connection) -> str:
        """Wait until the broker has handled a request that gets no response.

        For that, send another request on the connection and read its response.
        """
        question = Step("ListTransactions", 0)
        connection.send(question, API_BY_NAME[question.api].request(producer_id_filters=[1]))
        if isinstance(connection.read(question), str):
            self._drop(step.connection)
            return CLOSED
        return NO_RESPONSE

    def _read_outstanding(self, connection: Connection) -> None:
        sent, connection.sent = connection.sent, []
        for place, step in sent:
            try:
                answer = connection.read(step)
            except OSError:
                answer = CLOSED
            if isinstance(answer, Part):
                self._bind(step, answer)
                answer = self._symbols.plain(answer, step.version)
            self.answers[place] = answer

    def _bind(self, step: Step, answer: Any) -> None:
        if step.binds and set(error_codes(answer)) <= {0, MemberIdRequired.code}:
            for variable, path in step.binds.items():
                value = value_at(answer, path)
                if value not in (None, -1, "", NO_ID):
                    self._names.variables[variable] = as_body(value)
                    self._symbols.bind(variable, value)

    def _settle(self) -> None:
        """Wait until the coordinator has completed all transactions of this run that were ended."""
        if not self._unsettled:
            return
        question = Step("DescribeTransactions", 0)
        request = API_BY_NAME[question.api].request(transactional_ids=sorted(self._unsettled))
        connection = self._connection("settling")
        deadline = time.monotonic() + PATIENCE_S
        pause_s = 0.001
        while True:
            connection.send(question, request)
            answer = connection.read(question)
            states = {state.transaction_state for state in getattr(answer, "transaction_states", ())}
            errors = {ERROR_NAMES.get(code) for code in error_codes(answer)}
            if not states & {*SETTLING} and not errors & {*PASSING}:
                break
            if time.monotonic() > deadline:
                break
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)
        self._unsettled.clear()


def deals_to_a_first(prefix: str) -> bool:
    """Return True if Kafka, given the choice between members A and B, assigns a partition to A, as our broker
    does.

    Kafka's uniform assignor assigns in the reverse order of a java.util.HashMap of the member ids.
    """
    a, b = (java_hash(f"{prefix}-{member}") & 0xFFFFFFFF for member in "AB")
    return (a ^ a >> 16) % JAVA_BUCKETS > (b ^ b >> 16) % JAVA_BUCKETS


def error_codes(answer: Any) -> Iterator[int]:
    """Yield every error code in a response."""
    for field in answer._struct.fields if isinstance(answer, Part) else ():
        value = getattr(answer, field.name)
        if field.name.endswith("error_code"):
            yield value
        elif field.struct is not None and value is not None:
            for part in value if field.is_array else [value]:
                yield from error_codes(part)


def run_together(runs: SequenceOf[Run], sequence: Sequence) -> Iterator[str]:
    """Run a sequence on all brokers, one step at a time. After each step, read late responses to parked
    requests.

    Yield the kind of each restart. The caller restarts the brokers, because they run other sequences too.
    """
    try:
        for step in (*sequence.steps, *sequence.observations):
            for run in runs:
                run.take(step)
            if step.kind in RESTARTS:
                yield step.kind
            _unpark(runs)
        for run in runs:
            run.finish()
    finally:
        for run in runs:
            run.close()


def _unpark(runs: SequenceOf[Run]) -> None:
    """Read the responses to parked requests if at least one broker has responded.

    If another broker does not respond within `LATE_S`, its response stays `PARKED`, which counts as a
    difference.
    """
    for place in sorted(runs[0].parked):
        connections = [run.parked[place][0] for run in runs]
        is_new = place == len(runs[0].answers) - 1
        if not any([connection.is_ready(PARK_S if is_new else 0) for connection in connections]):
            continue
        for run, connection in zip(runs, connections, strict=True):
            run.unpark(place, connection.is_ready(LATE_S))


class Outcome(NamedTuple):
    """The result of one sequence: the responses of both brokers, and the first difference."""

    sequence: Sequence
    ours: list[Any]
    theirs: list[Any]
    difference: Difference | None
    explained: list[Explained]


class Pair:
    """Our broker and Apache Kafka. `rules` apply to every subject, in addition to the subject's own rules."""

    def __init__(self, ours: BrokerUnderTest, theirs: BrokerUnderTest, rules: tuple[Rule, ...] = ()) -> None:
        self._brokers, self._rules = (ours, theirs), rules
        token = f"{os.getpid():x}{time.time_ns() // 10**6 % 2**32:x}"
        candidates = (f"d{token}-{number}" for number in _numbers)
        self._prefixes = (prefix for prefix in candidates if deals_to_a_first(prefix))

        for broker in self._brokers:
            find_coordinators(broker)

    def play_all(
        self, sequences: Iterable[tuple[Sequence, tuple[Rule, ...]]], jobs: int = 4
    ) -> Iterator[Outcome]:
        """Yield the outcome of each sequence. At most `jobs` sequences run at a time.

        Sequences without restarts come in the given order. Sequences with the same restarts run together, as
        soon as there are enough for a chunk.
        """
        with ThreadPoolExecutor(jobs) as pool:
            for chunk in _chunks(sequences, CHUNK):
                yield from self._play_chunk(chunk, pool)

    def confirmed(self, outcome: Outcome, rules: tuple[Rule, ...]) -> Outcome | None:
        """Run the sequence again, alone, and return its outcome. Return None if the difference is not
        confirmed.

        Kafka verifies transactions of several connections in one request, and uses the first one's version
        for all responses. So sequences that run at the same time can affect each other.
        """
        is_timed = any(step.kind == "pause" for step in outcome.sequence.steps)
        again = None
        for _ in range(CONFIRMATIONS):
            again = self.run_sequence(outcome.sequence, rules)
            # A time-out may expire early on a busy machine. So a sequence with pauses must show the
            # difference in every repetition.
            if (again.difference is not None) != is_timed:
                break
        return again if again is not None and again.difference is not None else None

    def run_sequence(self, sequence: Sequence, rules: tuple[Rule, ...]) -> Outcome:
        """Run one sequence alone, and return its outcome."""
        with ThreadPoolExecutor(2) as pool:
            (outcome,) = self._play_chunk([(sequence, rules)], pool)
            return outcome

    def _play_chunk(
        self, chunk: list[tuple[Sequence, tuple[Rule, ...]]], pool: ThreadPoolExecutor
    ) -> list[Outcome]:
        prefixes = [next(self._prefixes) for _ in chunk]
        topics = {
            f"{prefix}-{text}": options
            for prefix, (sequence, _) in zip(prefixes, chunk, strict=True)
            for text, options in sequence.topics.items()
        }
        ids = list(pool.map(lambda broker: create_topics(broker, topics), self._brokers))
        now_ms = int(time.time() * 1000)

        def runs_of(prefix: str, sequence: Sequence) -> list[Run]:
            own = [{text: known[f"{prefix}-{text}"] for text in sequence.topics} for known in ids]
            return [
                Run(broker, Names(prefix, mine, now_ms))
                for broker, mine in zip(self._brokers, own, strict=True)
            ]

        runs = [runs_of(prefix, sequence) for prefix, (sequence, _) in zip(prefixes, chunk, strict=True)]
        playing = [run_together(both, sequence) for both, (sequence, _) in zip(runs, chunk, strict=True)]
        # All sequences of a chunk have the same restarts, so all reach a restart when one does.
        while kinds := {*pool.map(lambda sequence: next(sequence, ""), playing)} - {""}:
            # Restart in this thread, not in the pool. Kafka's process ends with the thread that started it,
            # and the pool's threads end earlier.
            for broker, known in zip(self._brokers, ids, strict=True):
                _restart(broker, topics, known, is_kill=kinds == {"kill"})
        list(pool.map(lambda broker: delete_topics(broker, list(topics)), self._brokers))
        answers = [[run.answers for run in both] for both in runs]
        return [
            Outcome(sequence, *two, *compare(sequence, (*rules, *self._rules), *two))
            for (sequence, rules), two in zip(chunk, answers, strict=True)
        ]


def _chunks(
    sequences: Iterable[tuple[Sequence, tuple[Rule, ...]]], size: int
) -> Iterator[list[tuple[Sequence, tuple[Rule, ...]]]]:
    """Group sequences with the same restarts into chunks of at most `size`, in the order of their
    sequences.
    """
    waiting: dict[tuple[str, ...], list[tuple[Sequence, tuple[Rule, ...]]]] = {}
    for sequence in sequences:
        chunk = waiting.setdefault(kinds := restarts_of(sequence[0]), [])
        chunk.append(sequence)
        if len(chunk) == size:
            yield waiting.pop(kinds)
    yield from waiting.values()


def _restart(
    broker: BrokerUnderTest, topics: dict[str, Any], ids: dict[str, bytes], *, is_kill: bool
) -> None:
    """Restart a broker. Return when it serves these topics and both kinds of coordinator."""
    broker.restart(kill=is_kill)
    find_coordinators(broker)
    _find_controller(broker)
    counts = {text: options.get("partitions", 1) for text, options in topics.items()}
    with RawClient(broker.bootstrap_servers) as client:
        wait_until_led(client, counts)
        _wait_until_groups_know(
            client, {text: options.get("partitions", 1) for text, options in topics.items()}
        )


def _wait_until_groups_know(client: RawClient, partition_counts: dict[str, int]) -> None:
    api = API_BY_NAME["ConsumerGroupHeartbeat"]
    wait_until_groups_know(
        lambda **fields: client.ask(build(api.request, fields), 1), f"probe-{uuid.uuid4()}", partition_counts
    )


def _find_controller(broker: BrokerUnderTest) -> None:
    """Wait until the broker's controller accepts changes.

    After a start, Kafka closes connections with requests for the controller until the broker has found the
    controller.
    """
    nothing = build(API_BY_NAME["CreateTopics"].request, {"topics": [], "timeout_ms": 30_000})
    deadline = time.monotonic() + READY_S
    while True:
        with RawClient(broker.bootstrap_servers) as client, contextlib.suppress(AssertionError, OSError):
            client.ask(nothing, 7)
            return
        if time.monotonic() > deadline:
            raise OncelogError(f"{broker.bootstrap_servers} has no controller")
        time.sleep(0.05)


def find_coordinators(broker: BrokerUnderTest) -> None:
    """Wait until both kinds of coordinator respond. The first look-up makes a broker create the coordinators'
    topics.

    Also allocate a producer id, because Kafka's first one is 0, which the fuzzer treats as "no producer id".
    """
    deadline = time.monotonic() + READY_S
    with RawClient(broker.bootstrap_servers) as client:
        for key_type in (0, 1):
            body = {"key_type": key_type, "coordinator_keys": ["any"]}
            request = build(API_BY_NAME["FindCoordinator"].request, body)
            while client.ask(request, 6).coordinators[0].error_code:
                if time.monotonic() > deadline:
                    raise OncelogError(f"{broker.bootstrap_servers} has no coordinators")
                time.sleep(0.05)
        init = build(API_BY_NAME["InitProducerId"].request, {"transactional_id": None})
        while client.ask(init, 4).error_code:
            if time.monotonic() > deadline:
                raise OncelogError(f"{broker.bootstrap_servers} gives no producer ids")
            time.sleep(0.05)


def create_topics(broker: BrokerUnderTest, topics: dict[str, Any]) -> dict[str, bytes]:
    """Create topics, wait for their leaders, and return their ids.

    `topics` maps each topic's name to its number of partitions and its settings.
    """
    rows = []
    for text, options in topics.items():
        configs = [
            {"name": key, "value": str(value)} for key, value in options.items() if key != "partitions"
        ]
        row = {"name": text, "num_partitions": options.get("partitions", 1), "replication_factor": 1}
        rows.append(row | {"configs": configs})
    if not rows:
        return {}
    with RawClient(broker.bootstrap_servers) as client:
        request = build(API_BY_NAME["CreateTopics"].request, {"topics": rows, "timeout_ms": 30_000})
        created = client.ask(request, 7).topics
        if failed := [row for row in created if row.error_code]:
            raise OncelogError(f"topics were not created: {failed}")
        partition_counts = {text: options.get("partitions", 1) for text, options in topics.items()}
        wait_until_led(client, {row.topic_id: partition_counts[row.name] for row in created})
        _wait_until_groups_know(client, partition_counts)
    return {row.name: row.topic_id for row in created}


def delete_topics(broker: BrokerUnderTest, topics: list[str]) -> None:
    """Delete those of the topics that exist."""
    if not topics:
        return
    with RawClient(broker.bootstrap_servers) as client:
        body = {"topics": [{"name": text} for text in topics], "timeout_ms": 30_000}
        client.ask(build(API_BY_NAME["DeleteTopics"].request, body), 6)


class Fixed:
    """A broker that is already running at this address. The fuzzer cannot restart it."""

    def __init__(self, bootstrap_servers: str, sasl_servers: str = "") -> None:
        self.bootstrap_servers, self.sasl_servers = bootstrap_servers, sasl_servers

    def restart(self, *, kill: bool) -> None:
        raise NotImplementedError("this broker was not started here")


def names_of(answers: Iterable[Any]) -> dict[str, int]:
    """Return how often each error name occurs in the responses."""
    counts: dict[str, int] = defaultdict(int)
    stack = list(answers)
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                if key.endswith("error_code"):
                    counts[str(inner)] += 1
                else:
                    stack.append(inner)
        elif isinstance(value, list):
            stack += value
    return dict(counts)
