"""The message tables, one file per family: requests and responses of all APIs, and stored keys and values."""

from oncelog.wire.tables import (
    cluster_apis,
    configs,
    consumer_group_log,
    consumer_groups,
    consumer_protocol,
    group_apis,
    group_log,
    metadata_log,
    offset_apis,
    placement,
    produce_and_fetch,
    producer_apis,
    quota_apis,
    security,
    topic_apis,
    transaction_apis,
    transaction_log,
)

TABLES: tuple[str, ...] = (
    produce_and_fetch.TABLE,
    cluster_apis.TABLE,
    producer_apis.TABLE,
    transaction_apis.TABLE,
    topic_apis.TABLE,
    configs.TABLE,
    placement.TABLE,
    group_apis.TABLE,
    offset_apis.TABLE,
    consumer_groups.TABLE,
    security.TABLE,
    quota_apis.TABLE,
)

DATA_TABLES: tuple[str, ...] = (
    transaction_log.TABLE,
    group_log.TABLE,
    consumer_group_log.TABLE,
    consumer_protocol.TABLE,
    metadata_log.TABLE,
)
