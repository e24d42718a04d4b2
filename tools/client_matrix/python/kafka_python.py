"""kafka-python for the matrix of clients."""

import kafka
from commands import Missing, serve
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaTimeoutError
from kafka.structs import OffsetAndMetadata

POLL_MS = 30_000
"""Longer than any rebalance. If a shorter poll of kafka-python 3.0.12 ends between the response to SyncGroup
and its processing, the assignment is lost: the consumer never fetches, and sends no heartbeat.
"""


class Client:
    version = kafka.__version__

    def __init__(self, servers):
        self.servers = servers

    def producer(self, kind, argument):
        settings = {
            "default": {},
            "idempotent": {"enable_idempotence": True, "batch_size": 0},
            "give-up": {
                "enable_idempotence": True, "batch_size": 0, "request_timeout_ms": 1000,
                "delivery_timeout_ms": int(argument or 0) if kind == "give-up" else 0,
            },
            "transactional": {"transactional_id": argument, "batch_size": 0},
        }[kind]  # fmt: skip
        self.writer = KafkaProducer(bootstrap_servers=self.servers, **settings)
        if kind == "transactional":
            self.writer.init_transactions()

    def send(self, topic, partition, value, done):
        future = self.writer.send(topic, value=value.encode(), partition=partition)
        future.add_callback(lambda _metadata: done(None))
        future.add_errback(done)

    def flush(self, seconds):
        try:
            self.writer.flush(timeout=seconds)
        except KafkaTimeoutError:
            pass  # the results say which records are pending

    def begin(self):
        self.writer.begin_transaction()

    def commit(self):
        self.writer.commit_transaction()

    def abort(self):
        self.writer.abort_transaction()

    def offsets(self, topic, offset):
        offsets = {TopicPartition(topic, 0): OffsetAndMetadata(offset, "", -1)}
        self.writer.send_offsets_to_transaction(offsets, self.reader.group_metadata())

    def subscribe(self, topic, group, isolation, protocol, instance):
        if protocol == "consumer":
            raise Missing("KafkaConsumer has no setting for the group protocol")
        settings = {} if isolation == "default" else {"isolation_level": isolation}
        settings |= {} if instance == "-" else {"group_instance_id": instance}
        self.reader = KafkaConsumer(
            topic, bootstrap_servers=self.servers, group_id=group, auto_offset_reset="earliest",
            enable_auto_commit=False, **settings,
        )  # fmt: skip

    def poll(self):
        found = self.reader.poll(timeout_ms=POLL_MS)
        return [message.value for batch in found.values() for message in batch]

    def close(self):
        self.reader.close()


if __name__ == "__main__":
    serve(Client)
