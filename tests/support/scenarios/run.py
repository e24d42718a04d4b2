"""Carrying a scenario out on one broker, over real sockets."""

from __future__ import annotations

import itertools
import struct
import time
from collections import defaultdict, deque
from typing import Any, NamedTuple, Protocol

from oncelog.errors import (
    CoordinatorLoadInProgress,
    NotLeaderOrFollower,
    UnknownLeaderEpoch,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from oncelog.wire.frames import decode_response
from oncelog.wire.messages import API_BY_NAME, Api
from support.broker import RawClient
from support.scenarios.consumer_groups import STEPS as CONSUMER_GROUP_STEPS
from support.scenarios.consumer_groups import ConsumerGroupSteps
from support.scenarios.groups import STEPS as GROUP_STEPS
from support.scenarios.reader import ANSWER, REQUEST, Scenario, offered_versions
from support.scenarios.transactions import STEPS as TRANSACTION_STEPS
from support.scenarios.values import (
    ANYTHING,
    ERROR_NAMES,
    Mismatch,
    Tagged,
    Variables,
    add_topic_ids,
    build,
    match,
    read_yaml,
    resolve,
)
from support.wait import attempts, pause

STEP_S = 0.02
EPOCHS_OF_A_RESTART = 2
"""Apache Kafka raises leader epochs when it fences the broker, and when it elects it again."""
POOL = 16
"""Topics made at a time: a controller writes them down in one go."""

NOT_SERVED = {
    error.code for error in (UnknownTopicOrPartition, NotLeaderOrFollower, UnknownTopicId, UnknownLeaderEpoch)
}

NOT_LEADER = "NOT_LEADER_OR_FOLLOWER"

_topic_numbers = itertools.count()


class TestBed(Protocol):
    """A broker under test. `epochs_rise`: a restart gives every partition a new leader epoch."""

    name: str
    epochs_rise: bool
    topics: TopicPool

    @property
    def bootstrap_servers(self) -> str: ...
    def restart(self, *, kill: bool) -> None: ...


class TopicPool:
    """Fresh topics of each kind, made many at a time and handed out when they take requests."""

    def __init__(self) -> None:
        self._ready: defaultdict[tuple[str, ...], deque[tuple[str, bytes]]] = defaultdict(deque)

    def take(self, client: RawClient, options: tuple[str, ...], count: int) -> tuple[str, bytes]:
        ready = self._ready[options]
        if not ready:
            names = [f"conformance-{next(_topic_numbers)}" for _ in range(count)]
            ready.extend(create_topics(client, names, options))
        return ready.popleft()


def create_topics(client: RawClient, names: list[str], options: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """Name and id of topics just made, which are served already."""
    settings = dict(option.split("=", 1) for option in options)
    partitions = int(settings.pop("partitions", 1))
    configs = [{"name": key, "value": value} for key, value in settings.items()]
    topic = {"num_partitions": partitions, "replication_factor": 1, "configs": configs}
    body = {"topics": [{"name": name, **topic} for name in names], "timeout_ms": 10_000}
    created = client.ask(build(API_BY_NAME["CreateTopics"].request, body), 7).topics
    assert [each.error_code for each in created] == [0] * len(names), created
    wait_until_served(client, {each.topic_id: partitions for each in created})
    return [(each.name, each.topic_id) for each in created]


def wait_until_served(client: RawClient, topics: dict[bytes, int], least_epoch: int = -1) -> None:
    """Return when each of the topics' partitions, so many, has a leader that answers.

    By id: under the name of a topic that was deleted and made again the old one may still be served.
    `least_epoch`: leaders of an older epoch do not count, any newer state does; -1: any leader.
    """
    wanted = [
        {
            "topic_id": topic_id,
            "partitions": [{"partition": i, "current_leader_epoch": least_epoch} for i in range(count)],
        }
        for topic_id, count in topics.items()
    ]
    request = build(API_BY_NAME["Fetch"].request, {"topics": wanted})
    answers: list[Any] = []
    for _ in attempts(lambda: f"the topics are not served: {answers[-1]}", step_s=STEP_S):
        answer = client.ask(request, 13)
        answers.append(answer)
        if not NOT_SERVED & {part.error_code for topic in answer.responses for part in topic.partitions}:
            return


class _Asked(NamedTuple):
    """A request whose answer is outstanding."""

    correlation_id: int
    api: Api | None
    version: int
    frame: bytes | None


class Run(ConsumerGroupSteps):
    """One scenario under way on one broker."""

    def __init__(self, scenario: Scenario, version: int | None, broker: TestBed) -> None:
        self.scenario, self.version, self.broker = scenario, version, broker
        self.variables: Variables = {"now": int(time.time() * 1000)}
        self.variables |= {name: f"conformance-{next(_topic_numbers)}" for name in ("free", "spare")}
        if version is not None:
            self.variables["v"] = version
        self.clients: dict[str, RawClient] = {}
        self.asked: defaultdict[str, deque[_Asked]] = defaultdict(deque)
        self.restarts = 0
        self.partitions: dict[bytes, int] = {}
        """How many each topic has, by topic id."""
        self.known_to_groups: set[tuple[int, bytes]] = set()
        """Partition of `__consumer_offsets` and topic id: that coordinator assigns the topic."""
        self.connection = "main"
        self.repeated: tuple[int, Any] | None = None

    def run(self) -> None:
        """Raises AssertionError with the step that failed."""
        try:
            for step in self.scenario.steps:
                try:
                    self.step(step)
                except (Mismatch, AssertionError) as error:
                    raise AssertionError(
                        f"{self.scenario.file}.md, {self.scenario.title}:\n{step}\n{error}"
                    ) from None
            assert not any(self.asked.values()), "a request's answer is not among the steps"
        finally:
            self._disconnect()

    def _disconnect(self) -> None:
        for client in self.clients.values():
            client.socket.close()
        self.clients.clear()

    @property
    def client(self) -> RawClient:
        if self.connection not in self.clients:
            self.clients[self.connection] = RawClient(self.broker.bootstrap_servers)
        return self.clients[self.connection]

    def step(self, step: str) -> None:
        if found := REQUEST.fullmatch(step):
            self._request(*found.groups())
        elif found := ANSWER.fullmatch(step):
            self._answer(*found.groups())
        else:
            verb, *rest = step.split()
            _STEPS[verb](self, *rest)

    def version_of(self, api: Api) -> int:
        if self.version is not None and api is self.scenario.api:
            return self.version
        return offered_versions(api)[-1]

    # --- requests and answers

    def _request(self, arrow: str, name: str, version_text: str | None, text: str) -> None:
        body = resolve(read_yaml(text), self.variables)
        if name == "frame":
            self._send_frame(**body)
            return
        api = API_BY_NAME[name]
        version = int(version_text) if version_text else self.version_of(api)
        message = add_topic_ids(build(api.request, body), self.variables)
        if arrow == ">>":
            self.repeated = version, message
        else:
            correlation_id = self.client.send(message, version)
            self.asked[self.connection].append(_Asked(correlation_id, api, version, None))

    def _send_frame(
        self, api_key: int, api_version: int, body: str = "", client_id: str | None = "raw", tags: str = "",
        size: int | None = None,
    ) -> None:  # fmt: skip
        name = b"" if client_id is None else client_id.encode()
        head = struct.pack(">hhih", api_key, api_version, 7, -1 if client_id is None else len(name))
        frame = head + name + bytes.fromhex(tags) + bytes.fromhex(body)
        self.client.socket.sendall(struct.pack(">i", len(frame) if size is None else size) + frame)
        self.asked[self.connection].append(_Asked(7, None, api_version, frame))

    def _answer(self, only: str, name: str | None, version_text: str | None, text: str) -> None:
        if only and only != self.broker.name:
            return
        if self.repeated is not None:
            self._repeat(read_yaml(text))
            return
        asked = self.asked[self.connection].popleft()
        if text == "nothing":
            return
        frame = self.client.read_frame()
        if text == "closed":
            assert frame is None, "the broker answered and kept the connection"
            self.clients.pop(self.connection).socket.close()
            return
        assert frame is not None, "the broker ended the connection"
        api = API_BY_NAME[name] if name else asked.api
        version = int(version_text) if version_text else asked.version
        assert api is not None
        correlation_id, answer = decode_response(api.response, version, frame)
        assert correlation_id == asked.correlation_id, f"an answer to another request: {answer}"
        match(read_yaml(text), answer, version, self.variables)

    def _repeat(self, expected: Any) -> None:
        assert self.repeated is not None
        version, message = self.repeated
        mismatches: list[Mismatch] = []
        for _ in attempts(lambda: mismatches[-1], step_s=STEP_S):
            variables = dict(self.variables)
            try:
                match(expected, self.client.ask(message, version), version, variables)
                break
            except Mismatch as error:
                mismatches.append(error)
        self.variables, self.repeated = variables, None

    # --- steps by name

    def on(self, connection: str) -> None:
        self.connection = connection

    def topic(self, name: str, *options: str) -> None:
        if name in self.variables:
            (taken,) = create_topics(self.client, [self.variables[name]], options)
        else:
            count = len(self.scenario.versions) or (1 if options else POOL)
            taken = self.broker.topics.take(self.client, options, count)
        self.variables[name], self.variables[f"{name}.id"] = taken
        self.partitions[taken[1]] = int(dict(o.split("=", 1) for o in options).get("partitions", 1))

    def producer(self, name: str) -> None:
        api = API_BY_NAME["InitProducerId"]
        request = build(api.request, {"transactional_id": None, "transaction_timeout_ms": 60_000})
        for _ in attempts(lambda: "no producer id", step_s=STEP_S):
            answer = self.client.ask(request, self.version_of(api))
            if answer.error_code != CoordinatorLoadInProgress.code:  # as a broker just started answers
                break
        assert (answer.error_code, answer.producer_epoch) == (0, 0)
        self.variables[name] = answer.producer_id

    def produce(self, place: str, *rest: str) -> None:
        arrow = rest.index("->")
        options: dict[str, Any] = {"values": [], "acks": -1} | self._options(rest[:arrow])
        if "by" in options:
            options |= {"pid": self.variables[options.pop("by")], "epoch": options.get("epoch", 0)}
        acks = options.pop("acks")
        topic, topic_id, index = self._place(place)
        batch = resolve(Tagged("batch", options), self.variables)
        part = {"index": index, "records": batch}
        data = {"name": topic, "topic_id": topic_id, "partition_data": [part]}
        body = {"transactional_id": None, "acks": acks, "timeout_ms": 10_000, "topic_data": [data]}
        api = API_BY_NAME["Produce"]
        for _ in attempts(lambda: f"the partition has no leader: {place}", step_s=STEP_S):
            answer = self.client.ask(build(api.request, body), self.version_of(api))
            result = answer.responses[0].partition_responses[0]
            error = ERROR_NAMES[result.error_code]
            # Nothing was stored, and a slow broker is perhaps only being elected once more.
            if error != NOT_LEADER or NOT_LEADER in rest[arrow:]:
                break
        self._expect_word(rest[arrow + 1 :], result.base_offset if error == "NONE" else error)

    def fetch(self, place: str, *rest: str) -> None:
        arrow = rest.index("->")
        options = self._options(rest[:arrow])
        topic, topic_id, index = self._place(place)
        part = {"partition": index, "fetch_offset": options.pop("from", 0), "partition_max_bytes": 1 << 20}
        data = {"topic": topic, "topic_id": topic_id, "partitions": [part]}
        api = API_BY_NAME["Fetch"]
        answer = self.client.ask(build(api.request, options | {"topics": [data]}), self.version_of(api))
        result = answer.responses[0].partitions[0]
        if result.error_code:
            self._expect_word(rest[arrow + 1 :], ERROR_NAMES[result.error_code])
        else:
            expected = self._expected(rest[arrow + 1 :])
            wanted = [] if expected == ["nothing"] else expected
            match(Tagged("records", wanted), result.records, 0, self.variables, "records")

    def restart(self) -> None:
        self._restart(kill=False)

    def kill(self) -> None:
        self._restart(kill=True)

    def _restart(self, *, kill: bool) -> None:
        self._disconnect()
        self.broker.restart(kill=kill)
        self.broker.topics = TopicPool()  # so that every scenario's topics begin at epoch 0
        self.known_to_groups.clear()
        self.restarts += 1
        if self.broker.epochs_rise:
            # Until it is fenced and elected again the broker serves as it did: that does not last.
            wait_until_served(self.client, self.partitions, EPOCHS_OF_A_RESTART * self.restarts)
        else:
            wait_until_served(self.client, self.partitions)

    def _place(self, text: str) -> tuple[str, bytes, int]:
        name, _, index = text.partition("/")
        return self.variables[name], self.variables[f"{name}.id"], int(index or 0)

    def _options(self, given: tuple[str, ...]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        for word in given:
            key, equals, value = word.partition("=")
            if equals and "." in key:
                outer, inner = key.split(".")
                options.setdefault(outer, {})[inner] = read_yaml(value)
            elif equals:
                options[key] = read_yaml(value)
            else:
                options.setdefault("values", []).append(word)
        return options

    def _expected(self, words: tuple[str, ...]) -> list[str]:
        """What is expected of this broker: `oncelog:0 apache:INVALID_RECORD` names one for each."""
        prefix = f"{self.broker.name}:"
        return [word.removeprefix(prefix) for word in words if word.startswith(prefix)] or list(words)

    def _expect_word(self, words: tuple[str, ...], actual: object) -> None:
        if self._expected(words) not in ([ANYTHING], [str(actual)]):
            raise Mismatch(f"got {actual}")

    def eventually(self, verb: str, *rest: str) -> None:
        """Repeat a step until it succeeds: Apache Kafka's broker applies the controller's answer later."""
        mismatches: list[Mismatch] = []
        for _ in attempts(lambda: mismatches[-1], step_s=STEP_S):
            try:
                _STEPS[verb](self, *rest)
                break
            except Mismatch as error:
                mismatches.append(error)

    def wait(self, seconds: str) -> None:
        pause(float(seconds))


_STEPS = {
    name: getattr(Run, name)
    for name in (
        "on",
        "topic",
        "producer",
        "produce",
        "fetch",
        "restart",
        "kill",
        "eventually",
        "wait",
        *TRANSACTION_STEPS,
        *GROUP_STEPS,
        *CONSUMER_GROUP_STEPS,
    )
}
