"""Schemas as a registry stores them. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SchemaType = Literal["AVRO", "JSON", "PROTOBUF"]
"""The names that a registry has for the types of schemas."""


@dataclass(frozen=True, slots=True)
class SchemaReference:
    """A schema that another one refers to.

    `name` is the name in the other schema: a full name in Avro, a URI in JSON Schema, an import path in
    Protobuf.
    """

    name: str
    subject: str
    version: int


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema and its references to other schemas.

    `text` is JSON for Avro and JSON Schema. For Protobuf it is a FileDescriptorProto in base 64. Registries
    accept and return this form instead of the text of a .proto file.
    """

    text: str
    type: SchemaType = "AVRO"
    references: tuple[SchemaReference, ...] = ()


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema with its id in the registry, and its version in a subject."""

    schema: Schema
    id: int
    subject: str
    version: int
