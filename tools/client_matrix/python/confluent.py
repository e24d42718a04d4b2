"""librdkafka, through confluent-kafka, for the matrix of clients."""

import time

import confluent_kafka
from commands import Failed, serve
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

ALONE = {"batch.num.messages": 1, "linger.ms": 0, "enable.idempotence": True}
LIMIT_S = 20


def error_text(error):
    return f"{error.name()}: {error.str()}{' (fatal)' if error.fatal() else ''}"


class Client:
    version = f"{confluent_kafka.libversion()[0]} (confluent-kafka {confluent_kafka.__version__})"

    def __init__(self, servers):
        self.servers = {"bootstrap.servers": servers}

    def producer(self, kind, argument):
        settings = {
            "default": {},
            "idempotent": ALONE,
            "give-up": {**ALONE, "message.timeout.ms": argument, "socket.timeout.ms": 1000},
            "transactional": {"batch.num.messages": 1, "linger.ms": 0, "transactional.id": argument},
        }[kind]
        self.writer = Producer(self.servers | settings)
        if kind == "transactional":
            self.called(self.writer.init_transactions, LIMIT_S)

    def called(self, call, *arguments):
        try:
            return call(*arguments)
        except KafkaException as error:
            raise Failed(error_text(error.args[0])) from None

    def send(self, topic, partition, value, done):
        def delivered(error, _message):
            done(error and error_text(error))

        self.called(
            lambda: self.writer.produce(topic, value.encode(), partition=partition, on_delivery=delivered)
        )

    def flush(self, seconds):
        # Not Producer.flush: it would call delivery callbacks while the exception of a fatal error is set.
        deadline = time.monotonic() + seconds
        while len(self.writer) and time.monotonic() < deadline:
            try:
                self.writer.poll(0.1)
            except KafkaException:
                pass  # the results say which records failed

    def begin(self):
        self.called(self.writer.begin_transaction)

    def commit(self):
        self.flush(LIMIT_S)  # it serves the delivery callbacks
        self.called(self.writer.commit_transaction, LIMIT_S)

    def abort(self):
        self.called(self.writer.abort_transaction, LIMIT_S)

    def offsets(self, topic, offset):
        metadata = self.reader.consumer_group_metadata()
        offsets = [TopicPartition(topic, 0, offset)]
        self.called(self.writer.send_offsets_to_transaction, offsets, metadata, LIMIT_S)

    def subscribe(self, topic, group, isolation, protocol, instance):
        settings = {"group.id": group, "group.protocol": protocol, "auto.offset.reset": "earliest"}
        settings |= {"enable.auto.commit": False}
        settings |= {} if isolation == "default" else {"isolation.level": isolation}
        settings |= {} if instance == "-" else {"group.instance.id": instance}
        self.reader = Consumer(self.servers | settings)
        self.reader.subscribe([topic])

    def poll(self):
        message = self.reader.poll(0.2)
        if message is None:
            return []
        if message.error() and message.error().code() != KafkaError._PARTITION_EOF:
            raise Failed(error_text(message.error()))
        return [] if message.error() else [message.value()]

    def close(self):
        self.reader.close()


if __name__ == "__main__":
    serve(Client)
