"""The state that all steps of one scenario share: broker, connections and variables, and calls that use them.

The constructors of `RecordSteps`, `TransactionSteps`, `GroupSteps` and `ConsumerGroupSteps` take a `Context`.
Each of these classes has a table `verbs`: word of a step -> method that carries the step out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from oncelog.wire.messages import API_BY_NAME, Api
from support.broker import RawClient
from support.scenarios.reader import Scenario, offered_versions
from support.scenarios.topics import STEP_S, TopicPool, unused_name, wait_until_led
from support.scenarios.values import (
    ANYTHING,
    ERROR_NAMES,
    Mismatch,
    Variables,
    add_topic_ids,
    build,
    read_yaml,
    resolve,
)
from support.wait import attempts

EPOCHS_OF_A_RESTART = 2
"""Apache Kafka raises leader epochs when it fences the broker, and when it elects the broker again."""
CLASSIC_VERSIONS = {"Produce": 11, "EndTxn": 4, "TxnOffsetCommit": 4, "AddPartitionsToTxn": 3}
EPOCH_VERSIONS = {"Produce": 12, "EndTxn": 5, "TxnOffsetCommit": 5, "AddPartitionsToTxn": 3}
"""Versions of KIP-890's protocol, in which EndTxn raises the producer epoch."""
RETRIED = {
    "CONCURRENT_TRANSACTIONS", "COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR",
    "NOT_ENOUGH_REPLICAS",
}  # fmt: skip
"""Errors after which a step sends its request again, unless the step expects the error."""

Verbs = Mapping[str, Callable[..., None]]
"""Word of a step -> method that takes the step's other words."""


class BrokerUnderTest(Protocol):
    """A broker that scenarios run on."""

    name: str
    """`oncelog` or `apache`, as steps name it."""
    epochs_rise: bool
    """True if a restart gives every partition a new leader epoch."""
    topics: TopicPool
    has_coordinators: bool
    """True once FindCoordinator succeeded for a group and for a transactional id."""

    @property
    def bootstrap_servers(self) -> str: ...
    def restart(self, *, kill: bool) -> None: ...


class Context:
    """One scenario's connections and variables, with calls in the versions that the scenario names."""

    def __init__(self, scenario: Scenario, version: int | None, broker: BrokerUnderTest) -> None:
        self.scenario, self.version, self.broker = scenario, version, broker
        self.variables: Variables = {"now": int(time.time() * 1000)}
        self.variables |= {name: unused_name() for name in ("free", "spare")}
        if version is not None:
            self.variables["v"] = version
        self.connection = "main"
        """Name of the connection that the next request uses."""
        self.restarts = 0
        self.partition_counts: dict[bytes, int] = {}
        """Topic id -> number of partitions, for each topic of the scenario."""
        self._clients: dict[str, RawClient] = {}

    # --- connections

    @property
    def client(self) -> RawClient:
        """The current connection, opened if need be."""
        if self.connection not in self._clients:
            self._clients[self.connection] = RawClient(self.broker.bootstrap_servers)
        return self._clients[self.connection]

    def drop_connection(self) -> None:
        """Close the current connection; the next request opens another one."""
        self._clients.pop(self.connection).socket.close()

    def disconnect(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            client.socket.close()
        self._clients.clear()

    def restart_broker(self, *, kill: bool) -> None:
        """Stop the broker by SIGTERM or SIGKILL, start it, and wait for leaders of the scenario's topics."""
        self.disconnect()
        self.broker.restart(kill=kill)
        self.broker.topics = TopicPool()  # so that every scenario's topics begin at leader epoch 0
        self.restarts += 1
        # Apache Kafka's broker keeps its old epochs until the controller fences it and elects it again.
        epochs = EPOCHS_OF_A_RESTART * self.restarts
        wait_until_led(self.client, self.partition_counts, epochs if self.broker.epochs_rise else -1)

    # --- words of a step

    def split(self, words: tuple[str, ...]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return the options before `->`, and the expected words after it."""
        arrow = words.index("->")
        return parse_options(words[:arrow]), words[arrow + 1 :]

    def expected(self, words: tuple[str, ...]) -> list[str]:
        """Return the words for this broker: of `oncelog:0 apache:INVALID_RECORD`, one of the two."""
        prefix = f"{self.broker.name}:"
        return [word.removeprefix(prefix) for word in words if word.startswith(prefix)] or list(words)

    def expect(self, words: tuple[str, ...], actual: object) -> None:
        """Raise Mismatch unless the result is as expected. A result may be several words."""
        if self.expected(words) not in ([ANYTHING], str(actual).split()):
            raise Mismatch(f"got {actual}")

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
        """Return the group id under this name; its first use makes one up."""
        group_id: str = self.variables.setdefault(name, f"{self.variables['free']}-{name}")
        return group_id

    # --- calls

    def is_under_test(self, api: Api) -> bool:
        """Return True if the scenario's header names versions of this API."""
        return self.version is not None and api is self.scenario.api

    def version_of(self, api: Api) -> int:
        """Return the version under test, or the newest one for any other API."""
        if self.is_under_test(api):
            return self.version
        return offered_versions(api)[-1]

    def protocol_version_of(self, api: Api) -> int:
        """Return the version under test, or the one of the scenario's transaction protocol, or the newest."""
        versions = EPOCH_VERSIONS if self.scenario.raises_epoch else CLASSIC_VERSIONS
        if not self.is_under_test(api):
            return versions.get(api.name) or self.version_of(api)
        # Clients may use AddPartitionsToTxn up to version 3; later ones are for brokers.
        is_limited = api.name == "AddPartitionsToTxn"
        return min(self.version_of(api), versions[api.name]) if is_limited else self.version_of(api)

    def call(self, api_name: str, **body: Any) -> Any:
        """Send a request, after resolving its variables, and return the response."""
        api = API_BY_NAME[api_name]
        message = add_topic_ids(build(api.request, resolve(body, self.variables)), self.variables)
        return self.client.ask(message, self.protocol_version_of(api))

    def call_until(
        self, words: tuple[str, ...], call: Callable[[], tuple[str, Any]], *, is_read: bool = False
    ) -> Any:
        """Repeat a call until its result is as expected, and return its response.

        `call` returns the result in words, and the response. Raise Mismatch at once for a result that does
        not pass by itself; results of reads all may.
        """
        expected = self.expected(words)
        results: list[str] = []
        for _ in attempts(lambda: f"got {results[-1] or 'nothing'}", step_s=STEP_S):
            result, response = call()
            results.append(result)
            if expected in ([ANYTHING], result.split() or ["nothing"]):
                return response
            if not (is_read or result in RETRIED):
                raise Mismatch(f"got {result or 'nothing'}")
        raise AssertionError("attempts ended")

    def find_coordinators(self) -> None:
        """Wait until the broker has coordinators of groups and transactions.

        A broker creates `__consumer_offsets` and `__transaction_state` at the first FindCoordinator.
        """
        if self.broker.has_coordinators:
            return

        def call(key_type: int) -> tuple[str, Any]:
            response = self.call("FindCoordinator", key_type=key_type, coordinator_keys=["any"])
            return ERROR_NAMES[response.coordinators[0].error_code], response

        for key_type in (0, 1):
            self.call_until(("NONE",), lambda key_type=key_type: call(key_type))
        self.broker.has_coordinators = True


def parse_options(words: tuple[str, ...]) -> dict[str, Any]:
    """Return `key=value` words as a mapping, `a.b=value` as one inside it, all others in a list `values`."""
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
