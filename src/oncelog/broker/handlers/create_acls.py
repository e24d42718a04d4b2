"""CreateAcls (key 30), versions 1-3: add ACLs.

Adding an ACL that already exists is not an error. All valid ACLs of a request are stored in one write.

Errors: CLUSTER_AUTHORIZATION_FAILED without ALTER on the cluster; INVALID_REQUEST for an invalid ACL;
SECURITY_DISABLED without an authorizer.
Source: KIP-140; Kafka's AclControlManager.
"""

from __future__ import annotations

from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
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

_Result = CreateAclsResponse.AclCreationResult


def handle(state: BrokerState, request: Request, now_ms: int) -> CreateAclsResponse:
    state.round_meter.fill_round()
    message: CreateAclsRequest = request.message
    valid: list[Acl] = []
    results = []
    try:
        if state.authorizer is None:
            raise SecurityDisabled("no authorizer is configured; set authorizer.class.name")
        request.authorize(ResourceType.CLUSTER)
        for creation in message.creations:
            results.append(_add(creation, valid))
        state.authorizer.add(valid)
    except (BrokerError, StorageError) as error:
        refusal = error if isinstance(error, BrokerError) else KafkaStorageError(str(error))
        results = [_error_result(refusal) for _ in message.creations]
    return CreateAclsResponse(results=results)


def _add(creation: CreateAclsRequest.AclCreation, valid: list[Acl]) -> _Result:
    try:
        acl = _acl(creation)
        check_acl(acl)
    except BrokerError as error:
        return _error_result(error)
    valid.append(acl)
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
