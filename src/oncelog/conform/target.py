"""The broker that scenarios run on: its address, what it offers, and the names that scenarios use on it.

In a cluster of several nodes, all requests of a scenario go to one node. That node must lead the scenario's
topics and coordinate its transactional ids and groups. So scenarios create topics on that node, and use only
ids for which FindCoordinator returns that node.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from oncelog.conform.deadline import Deadline
from oncelog.conform.raw_connection import Endpoint, Offer, RawConnection
from oncelog.conform.topic_pool import Creation, Names, TopicPool
from oncelog.conform.values import ERROR_NAMES, Mismatch, build
from oncelog.wire.messages import API_BY_NAME

GROUP, TRANSACTION = 0, 1
"""The key types of FindCoordinator."""
FIRST_BATCHED_FIND = 4
"""First version of FindCoordinator whose requests have several keys."""
GONE = {"NONE", "UNKNOWN_TOPIC_OR_PARTITION"}
"""Results of DeleteTopics after which the topic does not exist."""
NOT_READY = {"COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR"}
_MAX_NAMES = 10_000
"""Maximum number of names that are tried to find one whose coordinator is the chosen node."""
_DELETED_AT_ONCE = 100

Expectations = Literal["apache", "oncelog"]


class Target:
    """A broker under test. If a scenario has different expected responses for Apache Kafka and Oncelog,
    `expects` selects which ones apply.
    """

    def __init__(self, endpoint: Endpoint, names: Names, expects: Expectations = "apache") -> None:
        self.endpoint, self.names, self.expects = endpoint, names, expects
        self.topics = TopicPool(names)
        self.group_ids: list[str] = []
        """Groups that scenarios used since the last clean-up."""
        self.has_coordinators = False
        """True once FindCoordinator succeeded for a group and for a transactional id."""
        self.node_id: int | None = None
        """The node that gets all requests, in a cluster of several nodes; None if there is one node."""
        self._offer: Offer | None = None

    def offer(self, client: RawConnection) -> Offer:
        """Return the versions and features that the broker offers. The first call asks the broker; later
        calls return the same result.
        """
        if self._offer is None:
            self._offer = client.offer()
        return self._offer

    def choose_node(self, client: RawConnection) -> None:
        """In a cluster of several nodes, choose the node that gets all requests.

        Raises Mismatch if the cluster does not say which nodes it has.
        """
        api = API_BY_NAME["Metadata"]
        request = build(api.request, {"topics": [], "allow_auto_topic_creation": False})
        response = client.ask(request, self.offer(client).newest(api, 12))
        brokers = response.brokers
        if not brokers:
            raise Mismatch("Metadata names no broker")
        if len(brokers) > 1:
            # Choose the controller, because before KRaft only the controller creates and deletes topics.
            node = next((row for row in brokers if row.node_id == response.controller_id), brokers[0])
            self.node_id, self.endpoint = node.node_id, self.endpoint.at(node.host, node.port)

    def creation(self, client: RawConnection) -> Creation:
        """Return the versions and the node for creating topics. Raises Unsupported if the broker offers no
        usable version.
        """
        offer = self.offer(client)
        create = offer.newest(API_BY_NAME["CreateTopics"], 7)
        return Creation(create, offer.newest(API_BY_NAME["Fetch"], 13), self.node_id)

    # --- coordinators

    def wait_for_coordinator(self, client: RawConnection, key: str, key_type: int, deadline: Deadline) -> int:
        """Wait until a group or transactional id has a coordinator, and return its node. Raises Mismatch for
        an unexpected error or at the deadline.
        """
        api = API_BY_NAME["FindCoordinator"]
        version = self.offer(client).newest(api, api.last_version)
        request = build(api.request, {"key_type": key_type, "key": key, "coordinator_keys": [key]})
        names: list[str] = []
        for _ in deadline.attempts(lambda: Mismatch(f"FindCoordinator: {names[-1]}", "NONE", names[-1])):
            response = client.ask(request, version)
            found: Any = response.coordinators[0] if version >= FIRST_BATCHED_FIND else response
            names[:] = [ERROR_NAMES[found.error_code]]
            if not found.error_code:
                return int(found.node_id)
            if names[0] not in NOT_READY:
                raise Mismatch(f"FindCoordinator: {names[0]}", "NONE", names[0])
        raise AssertionError("attempts ended")

    def coordinated(self, client: RawConnection, name: str, key_type: int, deadline: Deadline) -> str:
        """Return `name`. In a cluster of several nodes, append a number if needed, so that the chosen node is
        the coordinator.
        """
        if self.node_id is None:
            return name
        for candidate in _variations(name):
            if self.wait_for_coordinator(client, candidate, key_type, deadline) == self.node_id:
                return candidate
        raise Mismatch(f"node {self.node_id} coordinates none of {_MAX_NAMES} names")

    def coordinated_name(self, client: RawConnection, deadline: Deadline) -> str:
        """Return an unused name. The chosen node is its coordinator both as a group id and as a transactional
        id.
        """
        name = self.names.unused()
        if self.node_id is None:
            return name
        for candidate in _variations(name):
            of_group = self.wait_for_coordinator(client, candidate, GROUP, deadline)
            if (
                of_group
                == self.node_id
                == self.wait_for_coordinator(client, candidate, TRANSACTION, deadline)
            ):
                return candidate
        raise Mismatch(f"node {self.node_id} coordinates none of {_MAX_NAMES} names")

    # --- clean-up

    def clean_up(self, deadline: Deadline, *, also_unused: bool) -> None:
        """Delete the topics and groups that scenarios have used so far; with `also_unused` also the pool's
        unused topics.

        Raises Mismatch, OncelogError and OSError if the broker does not delete them.
        """
        topics = self.topics.taken + (self.topics.take_all_unused() if also_unused else [])
        groups, self.topics.taken, self.group_ids = self.group_ids, [], []
        if not (topics or groups):
            return
        client = RawConnection(self.endpoint, deadline)
        try:
            for names in _chunks(topics):
                body = {"topic_names": names, "topics": [{"name": name} for name in names]}
                rows = self._ask(client, "DeleteTopics", 6, body | {"timeout_ms": 10_000}).responses
                kept = {ERROR_NAMES[row.error_code] for row in rows} - GONE
                if kept:
                    raise Mismatch(f"DeleteTopics: {', '.join(sorted(kept))}")
            for names in _chunks(groups):
                # Ignore errors: most groups were already deleted together with their topics' offsets.
                self._ask(client, "DeleteGroups", 2, {"groups_names": names})
        finally:
            client.close()

    def _ask(self, client: RawConnection, api_name: str, limit: int, body: dict[str, Any]) -> Any:
        api = API_BY_NAME[api_name]
        return client.ask(build(api.request, body), self.offer(client).newest(api, limit))


def _variations(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}.{number}" for number in range(1, _MAX_NAMES))


def _chunks(names: list[str]) -> Iterator[list[str]]:
    yield from (names[start : start + _DELETED_AT_ONCE] for start in range(0, len(names), _DELETED_AT_ONCE))
