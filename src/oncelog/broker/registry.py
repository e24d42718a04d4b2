"""Which file answers which API, and in which versions that is offered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oncelog.broker.apis import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    alter_configs,
    api_versions,
    consumer_group_describe,
    consumer_group_heartbeat,
    create_partitions,
    create_topics,
    delete_groups,
    delete_records,
    delete_topics,
    describe_cluster,
    describe_configs,
    describe_groups,
    describe_log_dirs,
    describe_producers,
    describe_transactions,
    end_txn,
    fetch,
    find_coordinator,
    heartbeat,
    incremental_alter_configs,
    init_producer_id,
    join_group,
    leave_group,
    list_groups,
    list_offsets,
    list_transactions,
    metadata,
    offset_commit,
    offset_delete,
    offset_fetch,
    offset_for_leader_epoch,
    produce,
    sync_group,
    txn_offset_commit,
    write_txn_markers,
)
from oncelog.wire.messages import API_BY_KEY, Api

HANDLERS: dict[int, Callable[[Any, Any, int], Any]] = {
    module.KEY: module.handle
    for module in (
        produce,
        fetch,
        list_offsets,
        metadata,
        find_coordinator,
        api_versions,
        create_topics,
        delete_topics,
        delete_records,
        init_producer_id,
        offset_for_leader_epoch,
        describe_configs,
        alter_configs,
        describe_log_dirs,
        create_partitions,
        incremental_alter_configs,
        describe_cluster,
        describe_producers,
        add_partitions_to_txn,
        add_offsets_to_txn,
        end_txn,
        write_txn_markers,
        describe_transactions,
        list_transactions,
        txn_offset_commit,
        offset_commit,
        offset_fetch,
        offset_delete,
        join_group,
        sync_group,
        heartbeat,
        leave_group,
        describe_groups,
        list_groups,
        delete_groups,
        consumer_group_heartbeat,
        consumer_group_describe,
    )
}
"""API key -> handle(node, request, now_ms)."""

OFFERED: dict[int, Api] = {key: API_BY_KEY[key] for key in sorted(HANDLERS)}
