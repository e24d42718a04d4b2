"""AlterClientQuotas (key 49), versions 0-1: set and remove quotas of users, client ids and IP addresses.

An entity with an error keeps its quotas; the others are altered. With validate_only nothing is altered.

Errors: CLUSTER_AUTHORIZATION_FAILED without ALTER_CONFIGS on the cluster; INVALID_REQUEST for an invalid
entity or quota, and for an entity that is named twice.
Source: KIP-546; Kafka's ClientQuotaControlManager.
"""

from __future__ import annotations

from collections import Counter

from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.state_file import EncodedRow
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import BrokerError, InvalidRequest, KafkaStorageError, StorageError
from oncelog.rules.limits.quotas import QuotaEntity, Values, normalize_entity, parse_entity
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import AlterClientQuotasRequest, AlterClientQuotasResponse

KEY = 49
ELEMENTS_PER_ENTITY = 4
"""Cost of checking the changes of an entity, in elements of a step."""

_Requested = AlterClientQuotasRequest.EntryData
_Result = AlterClientQuotasResponse.EntryData
_Name = tuple[tuple[str, str | None], ...]


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    state.round_meter.fill_round()
    answer: Answer = respond_in_steps(state.slots, _alter(state, request), is_cancellable=False)
    return answer


def _alter(state: BrokerState, request: Request) -> Work[AlterClientQuotasResponse]:
    message: AlterClientQuotasRequest = request.message
    budget = state.step_budget()
    named = Counter(map(_name, message.entries))
    entries = {_name(entry): entry for entry in message.entries}
    results, valid = [], []
    prepared: dict[QuotaEntity, tuple[Values, EncodedRow]] = {}
    for name, entry in entries.items():
        parts = [
            AlterClientQuotasResponse.EntityData(entity_type=kind, entity_name=part) for kind, part in name
        ]
        result = _Result(entity=parts)
        results.append(result)
        try:
            request.authorize(ResourceType.CLUSTER)
            if named[name] > 1:
                raise InvalidRequest("the entity occurs twice; a request may change it once")
            changes = [(op.key, None if op.remove else op.value) for op in entry.ops]
            entity = normalize_entity(parse_entity(name))
            valid.append((result, (entity, changes)))
            if not message.validate_only:
                prepared |= state.quotas.prepare(entity, changes)
        except BrokerError as error:
            result.error_code, result.error_message = error.code, error.message
        if budget.spend(ELEMENTS_PER_ENTITY):
            yield None
    try:
        changed = (change for _, change in valid)
        errors = yield from state.quotas.alter_in_steps(
            changed, is_test=message.validate_only, prepared=prepared
        )
    except StorageError as error:
        errors = [KafkaStorageError(str(error))] * len(valid)
    for (result, _), refusal in zip(valid, errors, strict=True):
        if refusal is not None:
            result.error_code, result.error_message = refusal.code, refusal.message
    return AlterClientQuotasResponse(entries=results)


def _name(entry: _Requested) -> _Name:
    """Return the entity's parts sorted by type, so that the same entity always has the same name."""
    return tuple(sorted({part.entity_type: part.entity_name for part in entry.entity}.items()))
