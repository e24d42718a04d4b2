"""Store and read the note (`PlanNote`) of which run of the driver writes a batch.

The note is stored before any task of the batch writes, and every task checks it.
"""

from __future__ import annotations

import asyncio

from oncelog.client.admin.blocking import Admin
from oncelog.client.admin.types import ConfigResource
from oncelog.errors import (
    BrokerError,
    UnstableOffsetCommit,
)
from oncelog.rules.transactions.client_session import FENCED_ERRORS
from oncelog.runtime.system import current
from oncelog.spark.sink.decisions import (
    BatchBegun,
    PlanNote,
    Refuse,
    SinkError,
    decide_begun,
    decide_plan,
)
from oncelog.spark.sink.kept_clients import TaskClients
from oncelog.spark.sink.state import Sink

_LOOKS, _PAUSE_S = 20, 0.025
"""Tasks other than task 0 read the note up to _LOOKS times, _PAUSE_S seconds apart, before they store it
themselves.
"""
_MAX_ATTEMPTS, _MAX_PAUSE_S = 20, 1.6
_DEFAULT_RETENTION_MINUTES = 10_080


def agree_on_plan(sink: Sink, clients: TaskClients, batch_id: int, task: int) -> PlanNote:
    """Store the note that names this run as the writer of the batch, unless it is stored already. Return the
    note. Raises SinkError if the run must not write the batch.
    """
    admin, is_left_open, max_pause_s = clients.admin, False, _PAUSE_S
    for look in range(_LOOKS + _MAX_ATTEMPTS):
        try:
            # A transaction that a dead writer of the note left open ends only when the next writer begins, or
            # at its timeout. Task 0 is the next writer, so it never waits for that transaction. Other tasks
            # wait once. See test_a_commit_record_left_open_by_a_dead_writer_is_resolved.
            found = sink.plan(admin, is_stable=task > 0 and not is_left_open)
        except UnstableOffsetCommit:
            is_left_open = True
            found = sink.plan(admin, is_stable=False)
        plan = decide_plan(batch_id, sink.run_id, found)
        if isinstance(plan, Refuse):
            raise plan.error(batch_id, task)
        if plan == found:
            return plan
        if task and look < _LOOKS and not is_left_open:
            # If several tasks stored the note at the same time, they would fence each other. So all tasks
            # except task 0 first wait for task 0 to store it.
            admin._thread.run(asyncio.sleep(_PAUSE_S))
            continue
        try:
            return _note_plan(sink, clients, batch_id, task)
        except FENCED_ERRORS:
            # Another task has taken over the note, or has begun to. See
            # test_a_task_is_fenced_by_another_one_while_it_commits_the_plan_note. The producer has failed, so
            # the next attempt needs another one.
            clients.drop_producer()
            # The other task, of this run or another run, stores the note itself.
            # Without a random pause, tasks that began together would fence each other again and again. See
            # test_tasks_that_fence_each_other_pause_for_random_times.
            admin._thread.run(asyncio.sleep(current().rng.uniform(0, max_pause_s)))
            max_pause_s = min(2 * max_pause_s, _MAX_PAUSE_S)
    raise SinkError(f"batch {batch_id}: several runs write this batch; stop all but one")


def _note_plan(sink: Sink, clients: TaskClients, batch_id: int, task: int) -> PlanNote:
    """Read and replace the note atomically: InitProducerId fences all other writers of the note before the
    note is read.

    All tasks of a batch follow the same note, so they agree on whether the batch is a repeat. In a repeat the
    tasks only prepare their transactions, and the driver ends them. See
    test_a_repeat_is_seen_only_once_every_task_has_succeeded.
    """
    admin, producer = clients.admin, clients.producer(sink.plan_id)
    producer.init_transactions()
    found = sink.plan(admin)
    plan = decide_plan(batch_id, sink.run_id, found)
    if isinstance(plan, Refuse):
        raise plan.error(batch_id, task)
    if plan == found:
        return plan
    begun = note_begun(sink, admin, batch_id)
    if begun is not None and not plan.is_repeat:
        plan = plan._replace(earlier=(begun.run_id,))
    if found is None and not plan.is_repeat and sink.has_state_of_0_4_1(admin):
        plan = plan._replace(earlier=("0.4.1",))
    with producer.transaction():
        producer.send_offsets_to_transaction({sink.marker_at: plan.encode()}, sink.plan_id)
    return plan


def note_begun(sink: Sink, admin: Admin, batch_id: int) -> BatchBegun | None:
    """Store the note that this run begins the batch, and return None. If another run began the batch before,
    store nothing and return the note of that run.

    Raises SinkError if the other run began so long ago that its markers may have expired, or if a later batch
    was begun.
    """
    begun, now_ms = sink.begun(admin), current().wall_ns() // 1_000_000
    is_vouched = sink.settings.vouched_batch_id == batch_id
    if begun is not None and begun.batch_id >= batch_id and not is_vouched:
        refusal = decide_begun(
            batch_id, sink.run_id, begun, now_ms, _retention_ms(admin), topic=sink.noted_topic
        )
        if refusal is not None:
            raise refusal.error(batch_id)
        return None if begun.run_id == sink.run_id else begun
    sink.keep(admin, sink.begun_id, BatchBegun(batch_id, sink.run_id, now_ms, sink.noted_topic).encode())
    return None


def _retention_ms(admin: Admin) -> int:
    """Return a broker's offsets.retention.minutes in ms, or Kafka's default if it cannot be read."""
    name, minutes = "offsets.retention.minutes", _DEFAULT_RETENTION_MINUTES
    try:
        node_id = str(min(broker.node_id for broker in admin.describe_cluster().brokers))
        (config,) = admin.describe_configs([ConfigResource("broker", node_id)]).values()
        minutes = int(config.entries[name].value or minutes)
    except (BrokerError, KeyError):
        pass
    return minutes * 60_000
