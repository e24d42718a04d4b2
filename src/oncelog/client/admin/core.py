"""Builds requests about topics, settings, records and log directories, and reads their responses."""

from __future__ import annotations

import base64
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from oncelog.client.admin.types import (
    ActiveProducer,
    BrokerVersions,
    ConfigDescription,
    ConfigEntry,
    ConfigOutcome,
    ConfigResource,
    ConfigSource,
    CreatedTopic,
    DeletedRecords,
    Feature,
    LogDirDescription,
    NewTopic,
    PartitionProducers,
    ReplicaLog,
    TopicDescription,
    TopicListing,
    TopicOutcome,
)
from oncelog.errors import BrokerError, OncelogError, error_for_code, named_text, raise_for_code
from oncelog.types import PartitionInfo, TopicPartition
from oncelog.wire.messages import (
    NO_ID,
    AlterConfigsRequest,
    AlterConfigsResponse,
    ApiVersionsResponse,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeLogDirsResponse,
    DescribeProducersRequest,
    DescribeProducersResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    MetadataResponse,
)

_SET, _DELETE = 0, 1
_RESOURCE_TYPES = {"topic": 2, "broker": 4}
_SOURCES: dict[int, ConfigSource] = {1: "topic", 2: "broker", 3: "cluster", 4: "file", 5: "default"}
_DEFAULT = 5
_KINDS = ("", "boolean", "string", "int", "short", "long", "double", "list", "class", "password")
"""Types of settings. Source: kafka DescribeConfigsResponse.ConfigType."""


class ItemResult(Protocol):
    """The result of one item of a call. `error` is None if the item succeeded."""

    @property
    def error(self) -> OncelogError | None: ...


R = TypeVar("R", bound=ItemResult)


def raise_first(results: Iterable[ItemResult]) -> None:
    """Raise the first error among the results, with the other errors as notes. Return if there is none."""
    errors = [result.error for result in results if result.error]
    if not errors:
        return
    for other in errors[1:]:
        errors[0].add_note(f"also: {other}")
    raise errors[0]


def topic_id_text(topic_id: bytes | None) -> str | None:
    """Return a topic id as Kafka prints it (URL-safe base64 without padding), or None for no id."""
    if topic_id is None or topic_id == NO_ID:
        return None
    return base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()


def error_of(code: int, message: str | None, what: str) -> BrokerError | None:
    """Return the error of one item, with the broker's message if it sent one. Return None if `code` is 0."""
    return error_for_code(code, f"{what}: {message}" if message else what) if code else None


def create_topics_request(
    topics: Collection[NewTopic], timeout_ms: int, validate_only: bool
) -> CreateTopicsRequest:
    rows = [
        CreateTopicsRequest.CreatableTopic(
            name=topic.name,
            num_partitions=-1 if topic.num_partitions is None else topic.num_partitions,
            replication_factor=-1 if topic.replication_factor is None else topic.replication_factor,
            configs=[
                CreateTopicsRequest.CreatableTopicConfig(name=name, value=config_text(value))
                for name, value in topic.configs.items()
            ],
        )
        for topic in topics
    ]
    return CreateTopicsRequest(topics=rows, timeout_ms=timeout_ms, validate_only=validate_only)


def config_text(value: object) -> str | None:
    """Return a setting's value as text: booleans in lower case, lists joined with commas. None stays None."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return None if value is None else str(value)


def created_topics(response: CreateTopicsResponse) -> dict[str, CreatedTopic]:
    return {
        row.name: CreatedTopic(
            name=row.name,
            topic_id=topic_id_text(row.topic_id),
            num_partitions=row.num_partitions if row.num_partitions >= 0 else None,
            replication_factor=row.replication_factor if row.replication_factor >= 0 else None,
            error=error_of(row.error_code, row.error_message, f"creating topic {row.name!r}"),
        )
        for row in response.topics
    }


def delete_topics_request(names: Collection[str], timeout_ms: int) -> DeleteTopicsRequest:
    return DeleteTopicsRequest(
        topics=[DeleteTopicsRequest.DeleteTopicState(name=name) for name in names],
        topic_names=list(names),
        timeout_ms=timeout_ms,
    )


def deleted_topics(response: DeleteTopicsResponse) -> dict[str, TopicOutcome]:
    return {
        row.name: TopicOutcome(
            row.name, error_of(row.error_code, row.error_message, f"deleting topic {row.name!r}")
        )
        for row in response.responses
        if row.name is not None
    }


def create_partitions_request(
    counts: Mapping[str, int], timeout_ms: int, validate_only: bool
) -> CreatePartitionsRequest:
    rows = [
        CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=count, assignments=None)
        for name, count in counts.items()
    ]
    return CreatePartitionsRequest(topics=rows, timeout_ms=timeout_ms, validate_only=validate_only)


def extended_topics(response: CreatePartitionsResponse) -> dict[str, TopicOutcome]:
    return {
        row.name: TopicOutcome(
            row.name, error_of(row.error_code, row.error_message, f"adding partitions to {row.name!r}")
        )
        for row in response.results
    }


def listed_topics(response: MetadataResponse) -> list[TopicListing]:
    return [
        TopicListing(row.name, topic_id_text(row.topic_id), row.is_internal, len(row.partitions))
        for row in sorted(response.topics, key=lambda row: row.name or "")
        if row.name is not None and not row.error_code
    ]


def described_topics(response: MetadataResponse) -> dict[str, TopicDescription]:
    return {row.name: _described_topic(row) for row in response.topics if row.name is not None}


def _described_topic(row: MetadataResponse.MetadataResponseTopic) -> TopicDescription:
    name = row.name or ""
    partitions = tuple(
        PartitionInfo(
            topic=name,
            partition=part.partition_index,
            leader=part.leader_id if part.leader_id >= 0 else None,
            leader_epoch=part.leader_epoch if part.leader_epoch >= 0 else None,
            replicas=tuple(part.replica_nodes),
            in_sync_replicas=tuple(part.isr_nodes),
        )
        for part in sorted(row.partitions, key=lambda part: part.partition_index)
    )
    return TopicDescription(
        name,
        topic_id_text(row.topic_id),
        row.is_internal,
        partitions,
        error_of(row.error_code, None, named_text(row.error_code, f"topic {name!r}")),
    )


def describe_configs_request(
    resources: Collection[ConfigResource], documented: bool = False
) -> DescribeConfigsRequest:
    rows = [
        DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=_RESOURCE_TYPES[resource.kind], resource_name=resource.name, configuration_keys=None
        )
        for resource in resources
    ]
    return DescribeConfigsRequest(
        resources=rows, include_synonyms=documented, include_documentation=documented
    )


def _resource_of(row: Any) -> ConfigResource:
    return ConfigResource(
        "topic" if row.resource_type == _RESOURCE_TYPES["topic"] else "broker", row.resource_name
    )


def described_configs(response: DescribeConfigsResponse) -> dict[ConfigResource, ConfigDescription]:
    results = {}
    for row in response.results:
        resource = _resource_of(row)
        entries = {entry.name: _config_entry(entry) for entry in row.configs}
        error = error_of(row.error_code, row.error_message, f"settings of {resource.kind} {resource.name!r}")
        results[resource] = ConfigDescription(resource, entries, error)
    return results


def _config_entry(entry: Any) -> ConfigEntry:
    return ConfigEntry(
        entry.name,
        entry.value,
        _SOURCES.get(entry.config_source, "unknown"),
        entry.read_only,
        entry.is_sensitive,
        _KINDS[entry.config_type] if 0 <= entry.config_type < len(_KINDS) else "",
        next((synonym.value for synonym in entry.synonyms if synonym.source == _DEFAULT), None),
        entry.documentation or "",
    )


def broker_versions(node_id: int, response: ApiVersionsResponse) -> BrokerVersions:
    """Return the API versions and features of an ApiVersions response. Raises BrokerError."""
    raise_for_code(response.error_code, f"versions of broker {node_id}")
    levels = {row.name: row.max_version_level for row in response.finalized_features}
    ranges = {row.name: (row.min_version, row.max_version) for row in response.supported_features}
    features = tuple(
        Feature(name, levels.get(name, 0), *ranges.get(name, (None, None)))
        for name in sorted(levels.keys() | ranges.keys())
    )
    apis = {row.api_key: (row.min_version, row.max_version) for row in response.api_keys}
    return BrokerVersions(node_id, apis, features)


ConfigChanges = Mapping[ConfigResource, Mapping[str, object]]
"""New values by resource and setting; None resets a setting to its default."""


def alter_configs_request(changes: ConfigChanges, validate_only: bool) -> IncrementalAlterConfigsRequest:
    message = IncrementalAlterConfigsRequest
    rows = [
        message.AlterConfigsResource(
            resource_type=_RESOURCE_TYPES[resource.kind],
            resource_name=resource.name,
            configs=[
                message.AlterableConfig(
                    name=name, config_operation=_DELETE if value is None else _SET, value=config_text(value)
                )
                for name, value in values.items()
            ],
        )
        for resource, values in changes.items()
    ]
    return message(resources=rows, validate_only=validate_only)


def replace_configs_request(
    changes: ConfigChanges, current: Mapping[ConfigResource, ConfigDescription], validate_only: bool
) -> AlterConfigsRequest:
    """Return an AlterConfigs request, for brokers before Kafka 2.3.

    AlterConfigs replaces all settings of a resource. So the request repeats the settings in `current` that
    were set on the resource and are not among the changes.
    """
    message = AlterConfigsRequest
    rows = []
    for resource, values in changes.items():
        own = {e.name: e.value for e in current[resource].entries.values() if e.source == resource.kind}
        merged = {**own, **{name: config_text(value) for name, value in values.items()}}
        configs = [
            message.AlterableConfig(name=name, value=value)
            for name, value in merged.items()
            if value is not None
        ]
        rows.append(
            message.AlterConfigsResource(
                resource_type=_RESOURCE_TYPES[resource.kind], resource_name=resource.name, configs=configs
            )
        )
    return message(resources=rows, validate_only=validate_only)


def altered_configs(
    response: IncrementalAlterConfigsResponse | AlterConfigsResponse,
) -> dict[ConfigResource, ConfigOutcome]:
    results = {}
    for row in response.responses:
        resource = _resource_of(row)
        what = f"altering {resource.kind} {resource.name!r}"
        results[resource] = ConfigOutcome(resource, error_of(row.error_code, row.error_message, what))
    return results


def _by_topic(
    partitions: Iterable[TopicPartition], row: Callable[[TopicPartition], Any]
) -> dict[str, list[Any]]:
    topics: dict[str, list[Any]] = {}
    for tp in partitions:
        topics.setdefault(tp.topic, []).append(row(tp))
    return topics


def delete_records_request(
    before_offsets: Mapping[TopicPartition, int | None], timeout_ms: int
) -> DeleteRecordsRequest:
    message = DeleteRecordsRequest

    def row(tp: TopicPartition) -> DeleteRecordsRequest.DeleteRecordsPartition:
        offset = before_offsets[tp]
        return message.DeleteRecordsPartition(
            partition_index=tp.partition, offset=-1 if offset is None else offset
        )

    topics = _by_topic(before_offsets, row)
    return message(
        topics=[message.DeleteRecordsTopic(name=name, partitions=rows) for name, rows in topics.items()],
        timeout_ms=timeout_ms,
    )


def deleted_records(response: DeleteRecordsResponse) -> dict[TopicPartition, DeletedRecords]:
    results = {}
    for topic in response.topics:
        for row in topic.partitions:
            tp = TopicPartition(topic.name, row.partition_index)
            error = error_of(row.error_code, None, f"deleting records of {tp}")
            results[tp] = DeletedRecords(tp, None if error else row.low_watermark, error)
    return results


def describe_producers_request(partitions: Iterable[TopicPartition]) -> DescribeProducersRequest:
    topics = _by_topic(partitions, lambda tp: tp.partition)
    return DescribeProducersRequest(
        topics=[
            DescribeProducersRequest.TopicRequest(name=name, partition_indexes=rows)
            for name, rows in topics.items()
        ]
    )


def described_producers(response: DescribeProducersResponse) -> dict[TopicPartition, PartitionProducers]:
    results = {}
    for topic in response.topics:
        for row in topic.partitions:
            tp = TopicPartition(topic.name, row.partition_index)
            producers = sorted(map(_active_producer, row.active_producers), key=lambda p: p.producer_id)
            error = error_of(row.error_code, row.error_message, f"producers of {tp}")
            results[tp] = PartitionProducers(tp, tuple(producers), error)
    return results


def _active_producer(row: DescribeProducersResponse.ProducerState) -> ActiveProducer:
    return ActiveProducer(
        producer_id=row.producer_id,
        producer_epoch=row.producer_epoch,
        last_sequence=row.last_sequence if row.last_sequence >= 0 else None,
        last_timestamp_ms=row.last_timestamp if row.last_timestamp >= 0 else None,
        coordinator_epoch=row.coordinator_epoch if row.coordinator_epoch >= 0 else None,
        current_txn_start_offset=row.current_txn_start_offset if row.current_txn_start_offset >= 0 else None,
    )


def described_log_dirs(node_id: int, response: DescribeLogDirsResponse) -> list[LogDirDescription]:
    return [
        LogDirDescription(
            node_id=node_id,
            path=row.log_dir,
            replicas=tuple(
                ReplicaLog(
                    TopicPartition(topic.name, part.partition_index),
                    part.partition_size,
                    part.offset_lag,
                    part.is_future_key,
                )
                for topic in row.topics
                for part in topic.partitions
            ),
            total_bytes=row.total_bytes if row.total_bytes >= 0 else None,
            usable_bytes=row.usable_bytes if row.usable_bytes >= 0 else None,
            error=error_of(row.error_code, None, f"log directory {row.log_dir} of broker {node_id}"),
        )
        for row in response.results
    ]
