"""Builds requests about client quotas and reads their responses. Source: KIP-546."""

from __future__ import annotations

from collections.abc import Mapping

from oncelog.errors import raise_for_code
from oncelog.rules.limits.quotas import DEFAULT, QuotaEntity, QuotaFilter, Values, parse_entity
from oncelog.wire.messages import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
)

QuotaChanges = Mapping[QuotaEntity, Mapping[str, float | None]]
"""New values by entity and quota name; None removes the quota."""


def describe_quotas_request(quota_filter: QuotaFilter) -> DescribeClientQuotasRequest:
    return DescribeClientQuotasRequest(
        components=[
            DescribeClientQuotasRequest.ComponentData(
                entity_type=kind,
                match_type=2 if name is None else 1 if name == DEFAULT else 0,
                match=name or None,
            )
            for kind, name in quota_filter.parts.items()
        ],
        strict=quota_filter.is_strict,
    )


def described_quotas(response: DescribeClientQuotasResponse) -> Mapping[QuotaEntity, Values]:
    """Return the quotas by entity. Raises BrokerError."""
    raise_for_code(response.error_code, response.error_message or "describing client quotas")
    return {
        parse_entity((part.entity_type, part.entity_name) for part in entry.entity): {
            value.key: value.value for value in entry.values
        }
        for entry in response.entries or ()
    }


def alter_quotas_request(changes: QuotaChanges, *, validate_only: bool) -> AlterClientQuotasRequest:
    return AlterClientQuotasRequest(
        entries=[
            AlterClientQuotasRequest.EntryData(
                entity=[
                    AlterClientQuotasRequest.EntityData(entity_type=kind, entity_name=name or None)
                    for kind, name in entity.parts.items()
                ],
                ops=[
                    AlterClientQuotasRequest.OpData(key=key, value=value or 0.0, remove=value is None)
                    for key, value in values.items()
                ],
            )
            for entity, values in changes.items()
        ],
        validate_only=validate_only,
    )


def check_quotas_altered(response: AlterClientQuotasResponse) -> None:
    """Raise the first error in the response; return if all entities were altered."""
    for entry in response.entries:
        parts = ", ".join(f"{part.entity_type} {part.entity_name or '<default>'}" for part in entry.entity)
        raise_for_code(entry.error_code, f"{parts}: {entry.error_message or 'refused'}")
