"""CreateAcls (key 30), versions 1-3. 31 without ALTER of the cluster, 42 what is no ACL, 54 no authorizer.

What is there already is no error. All good ones of a request are stored at once.
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
    message: CreateAclsRequest = request.message
    good: list[Acl] = []
    results = []
    try:
        if state.authorizer is None:
            raise SecurityDisabled("no authorizer is configured; set authorizer.class.name")
        request.authorize(ResourceType.CLUSTER)
        for asked in message.creations:
            results.append(_take(asked, good))
        state.authorizer.add(good)
    except (BrokerError, StorageError) as error:
        refusal = error if isinstance(error, BrokerError) else KafkaStorageError(str(error))
        results = [_refused(refusal) for _ in message.creations]
    return CreateAclsResponse(results=results)


def _take(asked: CreateAclsRequest.AclCreation, good: list[Acl]) -> _Result:
    try:
        acl = _acl(asked)
        check_acl(acl)
    except BrokerError as error:
        return _refused(error)
    good.append(acl)
    return _Result()


def _refused(error: BrokerError) -> _Result:
    return _Result(error_code=error.code, error_message=error.message)


def _acl(asked: CreateAclsRequest.AclCreation) -> Acl:
    try:
        return Acl(
            ResourceType(asked.resource_type),
            asked.resource_name,
            PatternType(asked.resource_pattern_type),
            asked.principal,
            asked.host,
            Operation(asked.operation),
            Permission(asked.permission_type),
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
