"""asyncio clients in a program whose tasks run up to their first await when they are made."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.client import append, batch_of
from support.topics import new_topic

from oncelog import Admin, TopicPartition
from oncelog.aio import Consumer


class EagerTask(asyncio.tasks._PyTask):  # type: ignore[misc, name-defined]
    """A task that runs up to its first await before its constructor returns."""

    def __init__(self, coroutine: Any, *, loop: Any, **options: Any) -> None:
        call_soon, loop.call_soon = loop.call_soon, lambda *args, **_: None  # do not schedule the first step
        try:
            super().__init__(coroutine, loop=loop, **options)
        finally:
            loop.call_soon = call_soon
        creator = asyncio.current_task(loop)
        asyncio.tasks._leave_task(loop, creator)  # type: ignore[attr-defined]
        try:
            self._Task__step()
        finally:
            asyncio.tasks._enter_task(loop, creator)  # type: ignore[attr-defined]


def eager_task(loop: Any, coroutine: Any, **options: Any) -> Any:
    """Do what asyncio.eager_task_factory does, which Python 3.11 lacks."""
    factory = getattr(asyncio, "eager_task_factory", None)
    return factory(loop, coroutine, **options) if factory else EagerTask(coroutine, loop=loop, **options)


@pytest.mark.parametrize("how", ["commit", "automatic"])
def test_commits_are_sent_by_eager_tasks(ours: str, group: str, how: str) -> None:
    """Regression: with asyncio.eager_task_factory (Python 3.12), no commit was ever sent."""
    topic = new_topic(ours)
    append(ours, TopicPartition(topic, 0), batch_of(b"a", b"b"))
    settings = {"bootstrap.servers": ours, "group.id": group, "auto.offset.reset": "earliest"}

    async def work() -> None:
        asyncio.get_running_loop().set_task_factory(eager_task)
        async with Consumer(settings, enable_auto_commit=how == "automatic") as consumer:
            consumer.assign(TopicPartition(topic, 0))
            while not await consumer.poll(60):
                pass
            if how == "commit":
                await consumer.commit()

    loop = asyncio.SelectorEventLoop()  # a uvloop loop refuses other attributes
    loop.run_until_complete(work())
    loop.close()
    with Admin(bootstrap_servers=ours) as admin:
        assert admin.group_offsets(group)[TopicPartition(topic, 0)].offset == 2
