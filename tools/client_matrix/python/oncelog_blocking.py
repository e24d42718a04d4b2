"""This project's blocking clients for the matrix of clients."""

from commands import serve

import oncelog
from oncelog import Consumer, OffsetAndMetadata, Producer, TopicPartition
from oncelog.errors import TimedOut

SETTINGS = {
    "default": {},
    "idempotent": {"batch.size": 1},
    "give-up": {
        "batch.size": 1,
        "linger.ms": 0,
        "request.timeout.ms": 1000,
        "delivery.timeout.ms": "ARGUMENT",
    },
    "transactional": {"batch.size": 1, "transactional.id": "ARGUMENT"},
}


class Client:
    version = oncelog.__version__

    def __init__(self, servers):
        self.servers = servers

    def settings(self, kind, argument):
        given = {key: argument if value == "ARGUMENT" else value for key, value in SETTINGS[kind].items()}
        return {"bootstrap.servers": self.servers, **given}

    def producer(self, kind, argument):
        self.writer = Producer(self.settings(kind, argument))
        if kind == "transactional":
            self.writer.init_transactions()

    def send(self, topic, partition, value, done):
        self.writer.send(
            topic, value.encode(), partition=partition, on_delivery=lambda _metadata, error: done(error)
        )

    def flush(self, seconds):
        try:
            self.writer.flush(seconds)
        except TimedOut:
            pass  # the results say which records are pending

    def begin(self):
        self.writer.begin_transaction()

    def commit(self):
        self.writer.commit_transaction()

    def abort(self):
        self.writer.abort_transaction()

    def offsets(self, topic, offset):
        offsets = {TopicPartition(topic, 0): OffsetAndMetadata(offset)}
        self.writer.send_offsets_to_transaction(offsets, self.reader.group_metadata())

    def consumer_settings(self, group, isolation, protocol, instance):
        settings = {"bootstrap.servers": self.servers, "group.id": group, "group.protocol": protocol}
        settings |= {"auto.offset.reset": "earliest", "enable.auto.commit": False}
        settings |= {} if isolation == "default" else {"isolation.level": isolation}
        return settings | ({} if instance == "-" else {"group.instance.id": instance})

    def subscribe(self, topic, group, isolation, protocol, instance):
        self.reader = Consumer(self.consumer_settings(group, isolation, protocol, instance))
        self.reader.subscribe([topic])

    def poll(self):
        return [record.value for record in self.reader.poll(0.2)]

    def close(self):
        self.reader.close()


if __name__ == "__main__":
    serve(Client)
