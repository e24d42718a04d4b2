"""DescribeClientQuotas (key 48), versions 0-1: the quotas of the entities that match a filter.

Errors: CLUSTER_AUTHORIZATION_FAILED without DESCRIBE_CONFIGS on the cluster; UNSUPPORTED_VERSION for an
unknown entity type; INVALID_REQUEST for a contradictory filter. Source: KIP-546; Kafka's ClientQuotaCache.
"""

from __future__ import annotations

from enum import IntEnum

from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import BrokerError, InvalidRequest
from oncelog.rules.limits.quotas import DEFAULT, QuotaEntity, QuotaFilter, Values
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import DescribeClientQuotasRequest, DescribeClientQuotasResponse

KEY = 48
ELEMENTS_PER_ENTITY = 2
"""Cost of one entity, in elements of a step."""


class Match(IntEnum):
    """The way in which a filter matches a part of an entity. Source: Kafka's DescribeClientQuotasRequest."""

    NAME = 0
    DEFAULT = 1
    ANY = 2


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _describe(state, request))
    return answer


def _describe(state: BrokerState, request: Request) -> Work[DescribeClientQuotasResponse]:
    try:
        request.authorize(ResourceType.CLUSTER)
        quota_filter = _filter(request.message)
    except BrokerError as error:
        return DescribeClientQuotasResponse(error_code=error.code, error_message=error.message, entries=None)
    entries: list[DescribeClientQuotasResponse.EntryData] = []
    budget = state.step_budget()
    # A change of quotas replaces the mapping, so it does not change between the steps.
    for entity, values in state.quotas.values.items():
        if quota_filter.matches(entity):
            entries.append(_entry(entity, values))
        if budget.spend(ELEMENTS_PER_ENTITY):
            yield None
    return DescribeClientQuotasResponse(error_message="", entries=entries)


def _filter(message: DescribeClientQuotasRequest) -> QuotaFilter:
    parts: dict[str, str | None] = {}
    for component in message.components:
        if component.entity_type in parts:
            raise InvalidRequest(f"entity type {component.entity_type!r} occurs twice")
        if not component.entity_type:
            raise InvalidRequest("an entity type is empty")
        if (component.match is not None) != (component.match_type == Match.NAME):
            raise InvalidRequest(
                f"match type {component.match_type}: a match needs a name for type 0, and no "
                "name for other types"
            )
        if component.match_type == Match.NAME:
            parts[component.entity_type] = component.match
        elif component.match_type in (Match.DEFAULT, Match.ANY):
            parts[component.entity_type] = DEFAULT if component.match_type == Match.DEFAULT else None
        else:
            raise InvalidRequest(f"match type {component.match_type} is unknown")
    quota_filter = QuotaFilter(parts, message.strict)
    quota_filter.check()
    return quota_filter


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
