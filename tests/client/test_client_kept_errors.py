"""Errors that a producer keeps and raises in many calls."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator

import pytest
from support.topics import new_topic, producer_of

from oncelog import Broker
from oncelog.errors import MessageTooLarge


def error_of(call: Callable[[], object]) -> MessageTooLarge:
    with pytest.raises(MessageTooLarge) as info:
        call()
    return info.value


def test_an_error_that_many_calls_raise_keeps_nothing_of_them(broker: Broker) -> None:
    """R1501: each call added its frames, and so its records, to the traceback of one error object."""
    topic = new_topic(broker.bootstrap_servers, max_message_bytes=1_000)
    with producer_of(broker.bootstrap_servers, transactional_id="kept", batch_size=1) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        refused = producer.send(topic, bytes(2_000))
        assert isinstance(refused.exception(60), MessageTooLarge)
        for call in (
            lambda: producer.send(topic, b"x"),
            lambda: producer.send_many(topic, [b"x"]),
            producer.commit_transaction,
            refused.result,
        ):
            frames = len(traceback.extract_tb(error_of(call).__traceback__))
            error = error_of(call)
            assert len(traceback.extract_tb(error.__traceback__)) == frames
            assert str(error) == str(refused.exception()) and error.reaction == "abortable"
        producer.abort_transaction()


def test_the_delivery_of_an_error_is_not_that_of_an_earlier_call(broker: Broker) -> None:
    """R1501: the second call had accepted no record, but its error named the records of the first one."""
    topic = new_topic(broker.bootstrap_servers, max_message_bytes=1_000)
    with producer_of(broker.bootstrap_servers, transactional_id="earlier", batch_size=1) as producer:
        producer.init_transactions()
        producer.begin_transaction()

        def refused_in_between() -> Iterator[bytes]:
            yield b"x"
            producer.send(topic, bytes(2_000)).exception(60)
            yield b"y"

        first = error_of(lambda: producer.send_many(topic, refused_in_between()))
        second = error_of(lambda: producer.send_many(topic, [b"z"]))
        assert len(first.delivery) == 1 and second.delivery is None
        producer.abort_transaction()
