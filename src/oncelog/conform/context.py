"""The state that all steps of one scenario share: broker, connections and variables. Its methods send
requests with them.

The constructors of `RecordSteps` and `TransactionSteps` take a `Context`. Each of these classes has a table
`verbs`: word of a step -> method that carries the step out. Tests add further classes of steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from oncelog.conform.deadline import Deadline
from oncelog.conform.raw_connection import RawConnection, Unsupported
from oncelog.conform.scenario_reader import Scenario, offered_versions
from oncelog.conform.target import GROUP, TRANSACTION, Target
from oncelog.conform.topic_pool import Topic
from oncelog.conform.values import (
    ANYTHING,
    Mismatch,
    Variables,
    add_topic_ids,
    build,
    read_yaml,
    resolve,
)
from oncelog.wire.messages import API_BY_NAME, Api

CLASSIC_VERSIONS = {"Produce": 11, "EndTxn": 4, "TxnOffsetCommit": 4, "AddPartitionsToTxn": 3}
EPOCH_VERSIONS = {"Produce": 12, "EndTxn": 5, "TxnOffsetCommit": 5, "AddPartitionsToTxn": 3}
"""Versions of the APIs in KIP-890's transaction protocol, in which EndTxn raises the producer epoch."""
TRANSACTION_VERSION = "transaction.version"
RETRIED = {
    "CONCURRENT_TRANSACTIONS", "COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR",
    "NOT_ENOUGH_REPLICAS",
}  # fmt: skip
"""Transient errors: a step repeats its request after one of them, unless the step expects this error."""

Verbs = Mapping[str, Callable[..., None]]
"""First word of a step -> method that carries the step out. Its arguments are the step's other words."""


class Context:
    """One scenario's connections and variables. Its requests use the API versions that the scenario's header
    demands.
    """

    def __init__(self, scenario: Scenario, version: int | None, target: Target, deadline: Deadline) -> None:
        self.scenario, self.version, self.target, self.deadline = scenario, version, target, deadline
        self.variables: Variables = {"now": int(time.time() * 1000)}
        if version is not None:
            self.variables["v"] = version
        self.connection = "main"
        """Name of the connection that the next request uses."""
        self.restarts = 0
        """Number of times that a step restarted the broker. Only tests have such steps."""
        self.partition_counts: dict[bytes, int] = {}
        """Topic id -> number of partitions, for each topic of the scenario."""
        self._clients: dict[str, RawConnection] = {}

    def prepare(self) -> None:
        """Choose the names `$free` and `$spare`, which no topic has, and check the scenario's header.

        Raises Unsupported if the broker lacks a version or feature that the header needs.
        """
        for name in ("free", "spare"):
            self.variables[name] = self.target.coordinated_name(self.client, self.deadline)
        offer = self.target.offer(self.client)
        if self.scenario.api is not None and self.version is not None:
            offer.check(self.scenario.api, self.version)
        if self.scenario.raises_epoch:
            for name, version in EPOCH_VERSIONS.items():
                offer.check(API_BY_NAME[name], version)
            level = offer.features.get(TRANSACTION_VERSION, 0)
            if level < 2:
                raise Unsupported(f"the broker's {TRANSACTION_VERSION} is {level}, not 2")

    # --- connections

    @property
    def client(self) -> RawConnection:
        """The current connection. It is opened if necessary."""
        if self.connection not in self._clients:
            self._clients[self.connection] = RawConnection(self.target.endpoint, self.deadline)
        return self._clients[self.connection]

    def drop_connection(self) -> None:
        """Close the current connection; the next request opens another one."""
        self._clients.pop(self.connection).close()

    def disconnect(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    # --- words of a step

    def split(self, words: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the parsed options before the word `->`, and the words of the expected result after it."""
        arrow = words.index("->")
        return parse_options(words[:arrow]), words[arrow + 1 :]

    def expected(self, words: tuple[str, ...]) -> list[str]:
        """Return those words of an expected result that apply to the broker under test, without their
        prefixes.

        For Apache Kafka, `oncelog:0 apache:INVALID_RECORD` becomes INVALID_RECORD. Words without a prefix
        apply to every broker.
        """
        prefix = f"{self.target.expects}:"
        return [word.removeprefix(prefix) for word in words if word.startswith(prefix)] or list(words)

    def expect(self, words: tuple[str, ...], actual: object) -> None:
        """Raise Mismatch unless the words of `actual` are the expected words. The expected word for "any
        result" is ANYTHING.
        """
        expected = self.expected(words)
        if expected not in ([ANYTHING], str(actual).split()):
            raise got(actual, expected)

    def partition(self, text: str) -> tuple[str, bytes, int]:
        """Return topic name, topic id and partition number of `T/1`, or of `T` for partition 0."""
        name, _, index = text.partition("/")
        return self.variables[name], self.variables[f"{name}.id"], int(index or 0)

    def offsets_to_commit(self, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the topics of an OffsetCommit or TxnOffsetCommit request for the options `T/1=OFFSET`."""
        topics = []
        for place in [name for name in options if "/" in name]:
            topic, _, index = self.partition(place)
            part = {"partition_index": index, "committed_offset": options[place]}
            part["committed_metadata"] = options.get("metadata", "")
            topics.append({"name": topic, "partitions": [part]})
        return topics

    def group_id(self, name: str) -> str:
        """Return the group id in the variable `name`. The first call for a name chooses an unused id."""
        if name not in self.variables:
            text = f"{self.variables['free']}-{name}"
            self.variables[name] = self.target.coordinated(self.client, text, GROUP, self.deadline)
            self.target.group_ids.append(self.variables[name])
        return str(self.variables[name])

    def transactional_id(self, text: str) -> str:
        """Return a transactional id that begins with `text`, and whose coordinator is the node under test."""
        return self.target.coordinated(self.client, text, TRANSACTION, self.deadline)

    def take_topic(self, options: tuple[str, ...], count: int) -> Topic:
        """Return an unused topic. If there is none, `count` topics are created."""
        how = self.target.creation(self.client)
        return self.target.topics.take(self.client, how, options, count, self.deadline)

    # --- calls

    def is_under_test(self, api: Api) -> bool:
        """Return True if the scenario tests a version of this API (header `Versions:`)."""
        return self.version is not None and api is self.scenario.api

    def version_of(self, api: Api) -> int:
        """Return the version under test, or for any other API the newest that the broker offers.

        Raises Unsupported if the broker offers none.
        """
        if self.is_under_test(api):
            assert self.version is not None
            return self.version
        return self.target.offer(self.client).newest(api, offered_versions(api)[-1])

    def protocol_version_of(self, api: Api) -> int:
        """Return the version under test. For another API of the transaction protocol, return the protocol's
        version, and for any other API the newest.

        Raises Unsupported if the broker offers none.
        """
        versions = EPOCH_VERSIONS if self.scenario.raises_epoch else CLASSIC_VERSIONS
        if api.name not in versions:
            return self.version_of(api)
        if not self.is_under_test(api):
            return self.target.offer(self.client).newest(api, versions[api.name])
        # Limit AddPartitionsToTxn to version 3: only brokers may use later versions.
        is_limited = api.name == "AddPartitionsToTxn"
        return min(self.version_of(api), versions[api.name]) if is_limited else self.version_of(api)

    def call(self, api_name: str, **body: Any) -> Any:
        """Replace the variables in a request's fields, send the request, and return the response."""
        api = API_BY_NAME[api_name]
        message = add_topic_ids(build(api.request, resolve(body, self.variables)), self.variables)
        return self.client.ask(message, self.protocol_version_of(api))

    def require(self, api_name: str, min_version: int) -> None:
        """Raise Unsupported if the version that `call` would use is below `min_version` and the broker does
        not offer `min_version`.
        """
        api = API_BY_NAME[api_name]
        if self.protocol_version_of(api) < min_version:
            self.target.offer(self.client).check(api, min_version)

    def call_until(
        self, words: tuple[str, ...], call: Callable[[], tuple[str, Any]], *, is_read: bool = False
    ) -> Any:
        """Repeat a call until its result is as expected, and return its response.

        `call` returns the words of the result, and the response. Repeat it after a transient error, and with
        `is_read` after any unexpected result. Otherwise raise Mismatch immediately, because a repetition
        would not change the result.
        """
        expected = self.expected(words)
        results: list[str] = []
        for _ in self.deadline.attempts(lambda: got(results[-1] or "nothing", expected)):
            result, response = call()
            results[:] = [result]
            if expected in ([ANYTHING], result.split() or ["nothing"]):
                return response
            if not (is_read or result in RETRIED):
                raise got(result or "nothing", expected)
        raise AssertionError("attempts ended")

    def find_coordinators(self) -> None:
        """Wait until the cluster has a group coordinator and a transaction coordinator.

        A broker creates `__consumer_offsets` and `__transaction_state` at the first FindCoordinator.
        """
        if self.target.has_coordinators:
            return
        for key_type in (GROUP, TRANSACTION):
            self.target.wait_for_coordinator(self.client, self.variables["free"], key_type, self.deadline)
        self.target.has_coordinators = True


def got(actual: object, expected: list[str]) -> Mismatch:
    """Return the error that reports a step's actual and expected result."""
    return Mismatch(f"got {actual}", " ".join(expected), str(actual))


def parse_options(words: tuple[str, ...]) -> dict[str, Any]:
    """Return `key=value` words as a mapping, with a nested mapping for `a.b=value`.

    Words without `=` are in the list `values`.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if equals and "." in key:
            outer, inner = key.split(".")
            options.setdefault(outer, {})[inner] = read_yaml(value)
        elif equals:
            options[key] = read_yaml(value)
        else:
            options.setdefault("values", []).append(word)
    return options
