"""Steps of scenarios that create topics, store records and read them.

`oncelog.conform.scenario_reader` describes each step.
"""

from __future__ import annotations

from typing import Any

from oncelog.conform.context import Context, Verbs
from oncelog.conform.topic_pool import create_topics
from oncelog.conform.values import ERROR_NAMES, Mismatch, Tagged, build, match, resolve
from oncelog.errors import CoordinatorLoadInProgress
from oncelog.wire.messages import API_BY_NAME

POOL_SIZE = 16
"""The number of topics that one CreateTopics request creates, if a step's topic has no options. Later steps
use the others.
"""
NOT_LEADER = "NOT_LEADER_OR_FOLLOWER"


class RecordSteps:
    """The steps `topic`, `producer`, `produce` and `fetch`."""

    def __init__(self, context: Context) -> None:
        self._context, self._variables = context, context.variables
        self.verbs: Verbs = {
            "topic": self._topic,
            "producer": self._producer,
            "produce": self._produce,
            "fetch": self._fetch,
        }

    def _topic(self, name: str, *options: str) -> None:
        context, variables = self._context, self._variables
        if name in variables:
            how = context.target.creation(context.client)
            (topic,) = create_topics(context.client, [variables[name]], options, how, context.deadline)
        else:
            count = len(context.scenario.versions) or (1 if options else POOL_SIZE)
            topic = context.take_topic(options, count)
        variables[name], variables[f"{name}.id"] = topic
        settings = dict(option.split("=", 1) for option in options)
        context.partition_counts[topic[1]] = int(settings.get("partitions", 1))

    def _producer(self, name: str) -> None:
        api = API_BY_NAME["InitProducerId"]
        request = build(api.request, {"transactional_id": None, "transaction_timeout_ms": 60_000})
        for _ in self._context.deadline.attempts(lambda: Mismatch("no producer id")):
            response = self._context.client.ask(request, self._context.version_of(api))
            # Repeat the request while a broker that has just started is loading its coordinators.
            if response.error_code != CoordinatorLoadInProgress.code:
                break
        result = f"{ERROR_NAMES[response.error_code]} {response.producer_epoch}"
        if result != "NONE 0":
            raise Mismatch(f"InitProducerId: got {result}", "NONE 0", result)
        self._variables[name] = response.producer_id

    def _produce(self, partition: str, *words: str) -> None:
        context = self._context
        options, expected = context.split(words)
        options.setdefault("values", [])
        options.setdefault("acks", -1)
        if "by" in options:
            options |= {"pid": context.variables[options.pop("by")], "epoch": options.get("epoch", 0)}
        acks = options.pop("acks")
        topic, topic_id, index = context.partition(partition)
        batch = resolve(Tagged("batch", options), context.variables)
        data = {"name": topic, "topic_id": topic_id, "partition_data": [{"index": index, "records": batch}]}
        body = {"transactional_id": None, "acks": acks, "timeout_ms": 10_000, "topic_data": [data]}
        api = API_BY_NAME["Produce"]
        for _ in context.deadline.attempts(lambda: Mismatch(f"the partition has no leader: {partition}")):
            response = context.client.ask(build(api.request, body), context.version_of(api))
            result = response.responses[0].partition_responses[0]
            error = ERROR_NAMES[result.error_code]
            # Repeat after NOT_LEADER_OR_FOLLOWER unless it is expected: nothing was stored, and the leader
            # may not be elected yet.
            if error != NOT_LEADER or NOT_LEADER in expected:
                break
        context.expect(expected, result.base_offset if error == "NONE" else error)

    def _fetch(self, partition: str, *words: str) -> None:
        context = self._context
        options, expected = context.split(words)
        topic, topic_id, index = context.partition(partition)
        part = {"partition": index, "fetch_offset": options.pop("from", 0), "partition_max_bytes": 1 << 20}
        data = {"topic": topic, "topic_id": topic_id, "partitions": [part]}
        api = API_BY_NAME["Fetch"]
        body: dict[str, Any] = options | {"topics": [data]}
        response = context.client.ask(build(api.request, body), context.version_of(api))
        result = response.responses[0].partitions[0]
        if result.error_code:
            context.expect(expected, ERROR_NAMES[result.error_code])
            return
        values = context.expected(expected)
        values = [] if values == ["nothing"] else values
        match(Tagged("records", values), result.records, 0, context.variables, "records")
