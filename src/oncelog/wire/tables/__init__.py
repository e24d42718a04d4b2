"""The message tables, one file per family: every request and answer, and what coordinators store."""

from oncelog.wire.tables import (
    cluster,
    configs,
    consumer_group_log,
    consumer_groups,
    consumer_protocol,
    group_log,
    groups,
    metadata_log,
    offsets,
    placement,
    producers,
    quotas,
    records,
    security,
    topics,
    transaction_log,
    transactions,
)

TABLES: tuple[str, ...] = (
    records.TABLE,
    cluster.TABLE,
    producers.TABLE,
    transactions.TABLE,
    topics.TABLE,
    configs.TABLE,
    placement.TABLE,
    groups.TABLE,
    offsets.TABLE,
    consumer_groups.TABLE,
    security.TABLE,
    quotas.TABLE,
)

DATA_TABLES: tuple[str, ...] = (
    transaction_log.TABLE,
    group_log.TABLE,
    consumer_group_log.TABLE,
    consumer_protocol.TABLE,
    metadata_log.TABLE,
)
