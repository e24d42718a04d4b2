"""DescribeClientQuotas (key 48), versions 0-1: the quotas of the entities that a filter takes.

31 without DESCRIBE_CONFIGS of the cluster, 35 an unknown type of entity, 42 a filter that contradicts itself.
"""

from __future__ import annotations

from enum import IntEnum

from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.errors import BrokerError, InvalidRequest
from oncelog.rules.limits.quotas import DEFAULT, QuotaEntity, QuotaFilter, Values
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import DescribeClientQuotasRequest, DescribeClientQuotasResponse

KEY = 48


class Match(IntEnum):
    """How a part of an entity is meant. Source: Kafka's DescribeClientQuotasRequest."""

    NAME = 0
    DEFAULT = 1
    ANY = 2


def handle(state: BrokerState, request: Request, now_ms: int) -> DescribeClientQuotasResponse:
    try:
        request.authorize(ResourceType.CLUSTER)
        wanted = _filter(request.message)
    except BrokerError as error:
        return DescribeClientQuotasResponse(error_code=error.code, error_message=error.message, entries=None)
    found = state.quotas.find(wanted)
    return DescribeClientQuotasResponse(error_message="", entries=[_entry(*each) for each in found.items()])


def _filter(message: DescribeClientQuotasRequest) -> QuotaFilter:
    parts: dict[str, str | None] = {}
    for asked in message.components:
        if asked.entity_type in parts:
            raise InvalidRequest(f"{asked.entity_type} is named twice")
        if not asked.entity_type:
            raise InvalidRequest("a type of entity is empty")
        if (asked.match is not None) != (asked.match_type == Match.NAME):
            raise InvalidRequest(f"match type {asked.match_type}: a name is given with type 0 and no other")
        if asked.match_type == Match.NAME:
            parts[asked.entity_type] = asked.match
        elif asked.match_type in (Match.DEFAULT, Match.ANY):
            parts[asked.entity_type] = DEFAULT if asked.match_type == Match.DEFAULT else None
        else:
            raise InvalidRequest(f"match type {asked.match_type} is not known")
    wanted = QuotaFilter(parts, message.strict)
    wanted.check()
    return wanted


def _entry(entity: QuotaEntity, values: Values) -> DescribeClientQuotasResponse.EntryData:
    return DescribeClientQuotasResponse.EntryData(
        entity=[
            DescribeClientQuotasResponse.EntityData(entity_type=kind, entity_name=name or None)
            for kind, name in entity.parts.items()
        ],
        values=[
            DescribeClientQuotasResponse.ValueData(key=key, value=value) for key, value in values.items()
        ],
    )
