"""CreateAcls (key 30), versions 1-3: add ACLs.

Adding an ACL that already exists is not an error. All valid ACLs of a request are stored in one write.

Errors: CLUSTER_AUTHORIZATION_FAILED without ALTER on the cluster; INVALID_REQUEST for an invalid ACL;
SECURITY_DISABLED without an authorizer.
Source: KIP-140; Kafka's AclControlManager.
"""

from __future__ import annotations

from oncelog.broker.request import Answer, Request
from oncelog.broker.security.authorizer import encode_acl
from oncelog.broker.state import BrokerState
from oncelog.broker.state_file import EncodedRow
from oncelog.broker.stepwise import Work, respond_in_steps
from oncelog.errors import (
    BrokerError,
    InvalidRequest,
    KafkaStorageError,
    SecurityDisabled,
    StorageError,
)
from oncelog.rules.security.authorization import (
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    check_acl,
)
from oncelog.wire.messages import CreateAclsRequest, CreateAclsResponse

KEY = 30
ELEMENTS_PER_ACL = 2
"""Cost of checking and encoding an ACL, in elements of a step."""

_Result = CreateAclsResponse.AclCreationResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    state.round_meter.fill_round()
    answer: Answer = respond_in_steps(state.slots, _create(state, request), is_cancellable=False)
    return answer


def _create(state: BrokerState, request: Request) -> Work[CreateAclsResponse]:
    message: CreateAclsRequest = request.message
    results, budget = [], state.step_budget()
    rows: dict[Acl, EncodedRow] = {}
    try:
        if state.authorizer is None:
            raise SecurityDisabled("no authorizer is configured; set authorizer.class.name")
        request.authorize(ResourceType.CLUSTER)
        for creation in message.creations:
            results.append(_check(creation, rows))
            if budget.spend(ELEMENTS_PER_ACL):
                yield None
        yield from state.authorizer.add_in_steps(rows)
    except (BrokerError, StorageError) as error:
        refusal = error if isinstance(error, BrokerError) else KafkaStorageError(str(error))
        results = [_error_result(refusal) for _ in message.creations]
    return CreateAclsResponse(results=results)


def _check(creation: CreateAclsRequest.AclCreation, rows: dict[Acl, EncodedRow]) -> _Result:
    """Add a valid ACL to `rows`, and return the result."""
    try:
        acl = _acl(creation)
        check_acl(acl)
    except BrokerError as error:
        return _error_result(error)
    rows[acl] = encode_acl(acl)
    return _Result()


def _error_result(error: BrokerError) -> _Result:
    return _Result(error_code=error.code, error_message=error.message)


def _acl(creation: CreateAclsRequest.AclCreation) -> Acl:
    try:
        return Acl(
            ResourceType(creation.resource_type),
            creation.resource_name,
            PatternType(creation.resource_pattern_type),
            creation.principal,
            creation.host,
            Operation(creation.operation),
            Permission(creation.permission_type),
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
