"""Schemas and messages for tests of the schema registry. The Protobuf classes are made without protoc."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2

ORDER = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "namespace": "shop",
        "fields": [
            {"name": "id", "type": "long"},
            {"name": "item", "type": "string"},
            {"name": "note", "type": ["null", "string"], "default": None},
        ],
    }
)
ORDER_ROW = {"id": 7, "item": "lamp", "note": None}
ORDER_JSON = json.dumps(
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Order",
        "type": "object",
        "properties": {"id": {"type": "integer"}, "item": {"type": "string"}},
        "required": ["id"],
    }
)

_FIELD = descriptor_pb2.FieldDescriptorProto


def protobuf_classes(prefix: str = "shop") -> dict[str, Any]:
    """Return the classes of two files: money.proto with Money, and order.proto with Customer, Order and the
    nested Order.Line. order.proto imports money.proto and google/protobuf/timestamp.proto.
    """
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    money = descriptor_pb2.FileDescriptorProto(name=f"{prefix}/money.proto", package=prefix, syntax="proto3")
    _add(money.message_type.add(name="Money"), "cents", 1, _FIELD.TYPE_INT64)
    order = descriptor_pb2.FileDescriptorProto(
        name=f"{prefix}/order.proto",
        package=prefix,
        syntax="proto3",
        dependency=[money.name, "google/protobuf/timestamp.proto"],
    )
    _add(order.message_type.add(name="Customer"), "name", 1, _FIELD.TYPE_STRING)
    message = order.message_type.add(name="Order")
    _add(message, "id", 1, _FIELD.TYPE_INT64)
    _add(message, "price", 2, _FIELD.TYPE_MESSAGE, f".{prefix}.Money")
    _add(message, "at", 3, _FIELD.TYPE_MESSAGE, ".google.protobuf.Timestamp")
    line = message.nested_type.add(name="Line")
    _add(line, "item", 1, _FIELD.TYPE_STRING)
    _add(message, "lines", 4, _FIELD.TYPE_MESSAGE, f".{prefix}.Order.Line").label = _FIELD.LABEL_REPEATED
    pool.Add(money)
    pool.Add(order)
    names = ("Money", "Customer", "Order", "Order.Line")
    found = {name: pool.FindMessageTypeByName(f"{prefix}.{name}") for name in names}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


def _add(message: Any, name: str, number: int, kind: Any, type_name: str | None = None) -> Any:
    field = message.field.add(name=name, number=number, type=kind, label=_FIELD.LABEL_OPTIONAL)
    if type_name is not None:
        field.type_name = type_name
    return field
