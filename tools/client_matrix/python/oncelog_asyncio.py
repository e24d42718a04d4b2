"""This project's asyncio clients for the matrix of clients."""

import asyncio

import oncelog_blocking
from commands import serve

from oncelog import OffsetAndMetadata, TopicPartition
from oncelog.aio import Consumer, Producer


class Client(oncelog_blocking.Client):
    """The asyncio calls; the settings are those of the blocking clients."""

    async def producer(self, kind, argument):
        self.writer = Producer(self.settings(kind, argument))
        if kind == "transactional":
            await self.writer.init_transactions()

    async def send(self, topic, partition, value, done):
        await self.writer.send(
            topic, value.encode(), partition=partition, on_delivery=lambda _metadata, error: done(error)
        )

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
        offsets = {TopicPartition(topic, 0): OffsetAndMetadata(offset)}
        await self.writer.send_offsets_to_transaction(offsets, self.reader.group_metadata())

    async def subscribe(self, topic, group, isolation, protocol, instance):
        self.reader = Consumer(self.consumer_settings(group, isolation, protocol, instance))
        self.reader.subscribe([topic])

    async def poll(self):
        return [record.value for record in await self.reader.poll(0.2)]

    async def close(self):
        await self.reader.close()


if __name__ == "__main__":
    serve(Client)
