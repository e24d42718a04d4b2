"""AlterUserScramCredentials (key 51), version 0: add, replace and remove credentials of SCRAM users.

    CLUSTER_AUTHORIZATION_FAILED  without ALTER on the cluster
    UNSUPPORTED_SASL_MECHANISM    not a SCRAM mechanism
    RESOURCE_NOT_FOUND            nothing to delete
    DUPLICATE_RESOURCE            a user named twice, unless its first change was refused
    UNACCEPTABLE_CREDENTIAL       an invalid number of iterations, salt or name

There is one result per user. Source: KIP-554; Kafka's ScramControlManager.
"""

from __future__ import annotations

from collections.abc import Iterator

from oncelog.broker.request import Answer, Request
from oncelog.broker.security.users import PreparedChange, UserChange
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import (
    BrokerError,
    DuplicateResource,
    KafkaStorageError,
    StorageError,
    without_traceback,
)
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import AlterUserScramCredentialsRequest, AlterUserScramCredentialsResponse

KEY = 51
ELEMENTS_PER_USER = 10
"""Cost of making a credential, in elements of a step."""

_Result = AlterUserScramCredentialsResponse.AlterUserScramCredentialsResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    state.round_meter.fill_round()
    answer: Answer = respond_in_steps(state.slots, _alter(state, request), is_cancellable=False)
    return answer


def _alter(state: BrokerState, request: Request) -> Work[AlterUserScramCredentialsResponse]:
    message: AlterUserScramCredentialsRequest = request.message
    budget = state.step_budget()
    changes: dict[str, PreparedChange] = {}
    errors: dict[str, BrokerError] = {}
    for change in _changes(message):
        name = change[0]
        if name in errors:
            continue
        try:
            request.authorize(ResourceType.CLUSTER)
            if changes.pop(name, None) is not None:
                raise DuplicateResource(f"user {name!r} occurs twice; a request may change a user once")
            changes[name] = state.users.prepare(*change)
        except BrokerError as error:
            errors[name] = without_traceback(error)
        if budget.spend(ELEMENTS_PER_USER):
            yield None
    try:
        refusals = yield from state.users.apply_in_steps(changes.values())
    except StorageError as error:
        refusals = [KafkaStorageError(str(error))] * len(changes)
    errors |= {name: refusal for name, refusal in zip(changes, refusals, strict=True) if refusal is not None}
    names = dict.fromkeys(change[0] for change in _changes(message))
    return AlterUserScramCredentialsResponse(results=[_result(name, errors.get(name)) for name in names])


def _changes(message: AlterUserScramCredentialsRequest) -> Iterator[UserChange]:
    """Yield the request's deletions and then its upsertions, in the order in which Kafka checks them."""
    for deletion in message.deletions:
        yield deletion.name, [deletion.mechanism], []
    for new in message.upsertions:
        yield new.name, [], [(new.mechanism, new.salt, new.salted_password, new.iterations)]


def _result(name: str, error: BrokerError | None) -> _Result:
    if error is None:
        return _Result(user=name)
    return _Result(user=name, error_code=error.code, error_message=error.message)
