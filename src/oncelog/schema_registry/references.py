"""Reads the schemas that a schema refers to, directly or through others."""

from __future__ import annotations

from oncelog.errors import SchemaDataError
from oncelog.schema_registry.client import SchemaRegistryClient
from oncelog.schema_registry.schemas import Schema

MAX_REFERENCES = 200
"""The maximum number of schemas that one schema refers to, directly or through others."""


def referenced_schemas(registry: SchemaRegistryClient, schema: Schema) -> dict[str, Schema]:
    """Return the schemas that `schema` refers to, directly or through others, by the names of the references.

    Each schema comes after the schemas that it refers to. Raises SchemaRegistryError, and SchemaDataError for
    more than MAX_REFERENCES.
    """
    found: dict[str, Schema] = {}
    started: set[str] = set()

    def visit(referring: Schema) -> None:
        for reference in referring.references:
            if reference.name in started:
                continue
            started.add(reference.name)
            if len(started) > MAX_REFERENCES:
                raise SchemaDataError(f"a schema refers to more than {MAX_REFERENCES} others")
            referenced = registry.get_version(reference.subject, reference.version).schema
            visit(referenced)
            found[reference.name] = referenced

    visit(schema)
    return found
