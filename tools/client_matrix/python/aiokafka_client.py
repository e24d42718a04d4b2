"""aiokafka for the matrix of clients."""

import asyncio

import aiokafka
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from commands import Missing, serve


class Client:
    version = aiokafka.__version__

    def __init__(self, servers):
        self.servers = servers

    async def producer(self, kind, argument):
        settings = {
            "default": {},
            "idempotent": {"enable_idempotence": True},
            "give-up": {
                "enable_idempotence": True,
                "request_timeout_ms": int(argument) if kind == "give-up" else 0,
            },
            "transactional": {"transactional_id": argument},
        }[kind]
        self.writer = AIOKafkaProducer(bootstrap_servers=self.servers, **settings)
        await self.writer.start()

    async def send(self, topic, partition, value, done):
        batch = self.writer.create_batch()  # a batch of its own for each record
        batch.append(key=None, value=value.encode(), timestamp=None)
        batch.close()
        future = await self.writer.send_batch(batch, topic, partition=partition)
        future.add_done_callback(lambda result: done(result.exception()))

    async def flush(self, seconds):
        async with asyncio.timeout(seconds):
            await self.writer.flush()

    async def begin(self):
        await self.writer.begin_transaction()

    async def commit(self):
        await self.writer.commit_transaction()

    async def abort(self):
        await self.writer.abort_transaction()

    async def offsets(self, topic, offset):
        await self.writer.send_offsets_to_transaction({TopicPartition(topic, 0): offset}, self.group)

    async def subscribe(self, topic, group, isolation, protocol, instance):
        if protocol == "consumer":
            raise Missing("AIOKafkaConsumer has no setting for the group protocol")
        self.group = group
        settings = {} if isolation == "default" else {"isolation_level": isolation}
        settings |= {} if instance == "-" else {"group_instance_id": instance}
        self.reader = AIOKafkaConsumer(
            topic, bootstrap_servers=self.servers, group_id=group, auto_offset_reset="earliest",
            enable_auto_commit=False, **settings,
        )  # fmt: skip
        await self.reader.start()

    async def poll(self):
        found = await self.reader.getmany(timeout_ms=200)
        return [message.value for batch in found.values() for message in batch]

    async def close(self):
        await self.reader.stop()


if __name__ == "__main__":
    serve(Client)
