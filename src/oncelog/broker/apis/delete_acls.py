"""DeleteAcls (key 31), versions 1-3. 31 without ALTER of the cluster, 42 unknown kinds, 54 no ACLs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.apis.describe_acls import acl_filter
from oncelog.errors import BrokerError, KafkaStorageError, SecurityDisabled, StorageError
from oncelog.rules.authorization import Acl, AclFilter, ResourceType
from oncelog.wire.messages import DeleteAclsRequest, DeleteAclsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 31

_Result = DeleteAclsResponse.DeleteAclsFilterResult


def handle(node: Node, request: Request, now_ms: int) -> DeleteAclsResponse:
    message: DeleteAclsRequest = request.message
    try:
        if node.authorizer is None:
            raise SecurityDisabled("no authorizer is configured; set authorizer.class.name")
        request.check(ResourceType.CLUSTER)
        asked = [_filter(each) for each in message.filters]
        removed = iter(node.authorizer.remove([each for each in asked if isinstance(each, AclFilter)]))
    except (BrokerError, StorageError) as error:
        refusal = error if isinstance(error, BrokerError) else KafkaStorageError(str(error))
        return DeleteAclsResponse(filter_results=[_refused(refusal) for _ in message.filters])
    return DeleteAclsResponse(
        filter_results=[
            _refused(each) if isinstance(each, BrokerError) else _removed(next(removed)) for each in asked
        ]
    )


def _filter(asked: DeleteAclsRequest.DeleteAclsFilter) -> AclFilter | BrokerError:
    try:
        return acl_filter(asked)
    except BrokerError as error:
        return error


def _refused(error: BrokerError) -> _Result:
    return _Result(error_code=error.code, error_message=error.message)


def _removed(acls: list[Acl]) -> _Result:
    return _Result(
        matching_acls=[
            DeleteAclsResponse.DeleteAclsMatchingAcl(
                resource_type=acl.resource_type,
                resource_name=acl.name,
                pattern_type=acl.pattern_type,
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission,
            )
            for acl in acls
        ]
    )
