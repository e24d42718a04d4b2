"""Calls that take several items also accept a single one, and refuse anything else."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oncelog import Admin, Broker, Consumer, NewTopic, Producer, TopicPartition, aio
from oncelog.client.admin.blocking import ConfigResource
from oncelog.client.arguments import by_partition, mapping_of, names_of, offsets_of, partitions_of
from oncelog.errors import MisuseError
from oncelog.local_audit import audit_topic
from oncelog.local_audit.topic_state import look_up, source_options
from oncelog.types import OffsetAndMetadata

T0 = TopicPartition("x1", 0)


@pytest.fixture
def consumer(broker: Broker) -> Iterator[Consumer]:
    at = {"bootstrap.servers": broker.bootstrap_servers, "group.id": "arguments"}
    with Consumer(at) as running:
        yield running


def test_deleting_a_topic_by_a_bare_name_deletes_that_topic(admin: Admin) -> None:
    admin.create_topics([NewTopic(name) for name in ("x", "1", "x1")])
    assert list(admin.delete_topics("x1")) == ["x1"]
    names = {topic.name for topic in admin.list_topics()}
    assert {"1", "x"} <= names and "x1" not in names
    admin.delete_topics(["x", "1"])


def test_a_single_item_is_taken_wherever_several_are(admin: Admin, consumer: Consumer) -> None:
    assert list(admin.create_topics(NewTopic("x1"))) == ["x1"]
    assert list(admin.describe_topics("x1")) == ["x1"]
    resource = ConfigResource("topic", "x1")
    assert list(admin.describe_configs(resource)) == [resource]
    assert list(admin.describe_producers(T0)) == [T0]
    assert admin.open_transactions("x1") == []
    assert admin.list_groups("Stable") == []
    consumer.assign(T0)
    assert consumer.assignment() == [T0]
    assert consumer.end_offsets(T0) == {T0: 0} == consumer.beginning_offsets(T0)
    consumer.commit({T0: 1})
    assert consumer.committed(T0) == {T0: OffsetAndMetadata(1)}
    assert admin.group_offsets("arguments", T0) == {T0: OffsetAndMetadata(1)}
    admin.delete_topics("x1")


SEVERAL = ("Collection[", "Sequence[", "Mapping[TopicPartition", "Mapping[str", "Mapping[ConfigResource")
ALIASES = {"Offsets", "Changes", "calls.Changes"}
NOT_ITEMS = {"alter_client_quotas"}


def _calls_with_several(face: type) -> list[tuple[str, str]]:
    """Return each public method of a client class, with each parameter that takes several items."""
    found = []
    for name, function in inspect.getmembers(face, inspect.isfunction):
        if name.startswith("_") or name in NOT_ITEMS:
            continue
        for parameter in inspect.signature(function).parameters.values():
            text = str(parameter.annotation)
            is_each = parameter.kind is parameter.VAR_POSITIONAL
            if is_each or any(part in text for part in SEVERAL) or text.split(" ")[0] in ALIASES:
                found.append((name, parameter.name))
    return found


ADMIN, CONSUMER = _calls_with_several(Admin), _calls_with_several(Consumer)
OTHERS: dict[str, Any] = {"name": "u", "password": "p", "group_id": "g"}


def _call(face: Any, name: str, parameter: str, value: object) -> None:
    function: Callable[..., Any] = getattr(face, name)
    known = inspect.signature(function).parameters
    others = {key: OTHERS[key] for key in known if key in OTHERS and key != parameter}
    if known[parameter].kind is inspect.Parameter.VAR_POSITIONAL:
        function(value)
    else:
        function(**others, **{parameter: value})


@pytest.mark.parametrize("value", [object, [object], b"x1", [b"x1"], [None], 3.5], ids=repr)
@pytest.mark.parametrize(("name", "parameter"), ADMIN)
def test_admin_refuses_what_is_no_item(admin: Admin, name: str, parameter: str, value: object) -> None:
    with pytest.raises(MisuseError, match="expected"):
        _call(admin, name, parameter, value)


@pytest.mark.parametrize("value", [object, [object], b"x1", [b"x1"], [None], 3.5], ids=repr)
@pytest.mark.parametrize(("name", "parameter"), CONSUMER)
def test_a_consumer_refuses_what_is_no_item(
    consumer: Consumer, name: str, parameter: str, value: object
) -> None:
    with pytest.raises(MisuseError, match="expected"):
        _call(consumer, name, parameter, value)


def test_the_calls_looked_at_are_not_few() -> None:
    assert len(ADMIN) >= 22 and len(CONSUMER) >= 11, (ADMIN, CONSUMER)


PUBLIC_MODULES = ("oncelog", "oncelog.aio", "oncelog.testing", "oncelog.local_audit", "oncelog.spark.audit")
NAMES = re.compile(r"(?:Collection|Sequence|Iterable|list|set|tuple)\[str[],]")


def _parameters_of_names() -> list[tuple[str, str]]:
    """Each parameter of the public functions that takes several names, and its annotation."""
    found = []
    for module in map(importlib.import_module, PUBLIC_MODULES):
        for name in module.__all__:
            public = getattr(module, name)
            functions = [(name, public)] if inspect.isfunction(public) else []
            if inspect.isclass(public) and not dataclasses.is_dataclass(public):
                functions += inspect.getmembers(public, inspect.isfunction)
            found += [
                (f"{module.__name__}.{name}.{function}({parameter.name})", str(parameter.annotation))
                for function, call in functions
                if not function.startswith("_") or function == "__init__"
                for parameter in inspect.signature(call).parameters.values()
                if NAMES.search(str(parameter.annotation))
            ]
    return found


def test_every_public_parameter_of_several_names_takes_one_name() -> None:
    found = _parameters_of_names()
    assert len(found) >= 30
    assert [place for place, annotation in found if not re.search(r"^str \||\| str\b", annotation)] == []


def test_an_audit_takes_the_name_of_one_compacted_topic_and_not_its_letters(
    admin: Admin, broker: Broker
) -> None:
    admin.create_topics([NewTopic("ab"), NewTopic("a")])
    options = source_options(broker.bootstrap_servers, ["ab", "a"], {})
    _, bounds = look_up(options, "ab")
    assert {tp.topic: of.is_compacted for tp, of in bounds.items()} == {"ab": True, "a": False}
    with pytest.raises(MisuseError, match="topic names"):
        audit_topic(broker.bootstrap_servers, [b"ab"])  # type: ignore[list-item]
    admin.delete_topics(["ab", "a"])


@pytest.mark.parametrize("text", ["abc", b"abc"], ids=repr)
def test_send_many_refuses_one_text_in_the_place_of_many(broker: Broker, text: Any) -> None:
    settings: dict[str, Any] = {"bootstrap_servers": broker.bootstrap_servers, "value_serializer": str.encode}

    async def send_from_a_task() -> None:
        async with aio.Producer(**settings) as producer:
            await producer.send_many("one", text)

    with Producer(**settings) as producer:
        with pytest.raises(MisuseError, match="values must be many values"):
            producer.send_many("one", text)
        with pytest.raises(MisuseError, match="keys must be many keys"):
            producer.send_many("one", ["v"], keys=text)
    with pytest.raises(MisuseError, match="values must be many values"):
        asyncio.run(send_from_a_task())


BAD_OFFSETS = [
    *("5", 5.0, None, True, (5,), -1, -5, 2**63),
    *(OffsetAndMetadata(offset) for offset in (-5, 2**63, "5", True)),  # type: ignore[arg-type]
]
BAD_NOTES = [
    (OffsetAndMetadata(1, -7), "leader epoch of x1-0"),
    (OffsetAndMetadata(1, 2**31), "leader epoch of x1-0"),
    (OffsetAndMetadata(1, None, 5), "metadata of x1-0"),  # type: ignore[arg-type]
    (OffsetAndMetadata(1, None, "\ud800"), "metadata of x1-0"),
    (OffsetAndMetadata(1, None, "x" * 32_768), "metadata of x1-0"),
]


@pytest.mark.parametrize(
    ("offset", "what"), [*((offset, "offset of x1-0") for offset in BAD_OFFSETS), *BAD_NOTES], ids=repr
)
def test_an_invalid_offset_is_refused_before_it_is_sent(broker: Broker, offset: Any, what: str) -> None:
    at = {"bootstrap.servers": broker.bootstrap_servers, "group.id": "arguments"}
    with Consumer(at) as consumer, pytest.raises(MisuseError, match=what):
        consumer.commit({T0: offset})
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "arguments"}
    with Producer(settings) as producer:
        producer.init_transactions()
        producer.begin_transaction()
        with pytest.raises(MisuseError, match=what):
            producer.send_offsets_to_transaction({T0: offset}, "g")
        producer.abort_transaction()


def test_offsets_that_cannot_be_written_end_the_transaction_and_not_the_producer(broker: Broker) -> None:
    settings = {"bootstrap.servers": broker.bootstrap_servers, "transactional.id": "arguments"}
    with Producer(settings) as producer, Admin({"bootstrap.servers": broker.bootstrap_servers}) as admin:
        admin.create_topics(NewTopic("x1"))
        producer.init_transactions()
        producer.begin_transaction()
        with pytest.raises(MisuseError, match="40000 bytes"):
            producer.send_offsets_to_transaction({T0: 1}, "g" * 40_000)
        producer.abort_transaction()
        with producer.transaction():
            producer.send_offsets_to_transaction({T0: 1}, "g")
        assert admin.group_offsets("g", T0) == {T0: OffsetAndMetadata(1)}
        admin.delete_topics("x1")


@pytest.mark.parametrize("number", [-1, 2**31])
def test_a_partition_that_cannot_be_is_refused(consumer: Consumer, number: int) -> None:
    with pytest.raises(MisuseError, match="numbered from 0"):
        consumer.assign(TopicPartition("x1", number))


@pytest.mark.parametrize("partition", ["0", 0.0, -1, 1], ids=repr)
def test_a_record_for_what_is_no_partition_is_refused(broker: Broker, partition: Any) -> None:
    with Producer({"bootstrap.servers": broker.bootstrap_servers}) as producer:
        assert producer.send("one", b"v", partition=0).result(60).partition == 0
        with pytest.raises(MisuseError, match="there is no partition"):
            producer.send("one", b"v", partition=partition)


@pytest.mark.parametrize("offset", ["1", 1.5, -1, 2**63], ids=repr)
def test_a_seek_to_what_is_no_offset_is_refused(consumer: Consumer, offset: Any) -> None:
    consumer.assign(T0)
    with pytest.raises(MisuseError, match="offset of x1-0"):
        consumer.seek(T0, offset)
    with pytest.raises(MisuseError, match="offset of x1-0"):
        consumer.fetch_range(T0, 0, offset)


def test_a_topic_named_by_bytes_is_refused(consumer: Consumer) -> None:
    with pytest.raises(MisuseError, match="must be a str"):
        consumer.partitions_for(b"x1")  # type: ignore[arg-type]


def test_arguments_become_lists_and_mappings() -> None:
    assert names_of("ab") == ["ab"] and names_of({"a": 1, "b": 2}) == ["a", "b"]
    assert partitions_of(T0) == [T0] and partitions_of(iter([T0])) == [T0]
    assert by_partition({T0: 3}) == {T0: 3} and mapping_of({"a": 1}, str, "names") == {"a": 1}
    assert offsets_of({T0: 3}) == {T0: OffsetAndMetadata(3)} == offsets_of({T0: OffsetAndMetadata(3)})
    for bad in (("x1", 0), [("x1", 0)], TopicPartition(0, "x1"), "x1"):  # type: ignore[arg-type]
        with pytest.raises(MisuseError, match="TopicPartition"):
            partitions_of(bad)  # type: ignore[arg-type]
