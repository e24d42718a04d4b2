"""DescribeAcls (key 29), versions 1-3. 31 without DESCRIBE of the cluster, 42 unknown kinds, 54 no ACLs."""

from __future__ import annotations

from itertools import groupby

from oncelog.broker.request import Request
from oncelog.broker.state import BrokerState
from oncelog.errors import BrokerError, InvalidRequest, SecurityDisabled
from oncelog.rules.security.authorization import (
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from oncelog.wire.messages import DeleteAclsRequest, DescribeAclsRequest, DescribeAclsResponse

KEY = 29


def handle(state: BrokerState, request: Request, now_ms: int) -> DescribeAclsResponse:
    try:
        if state.authorizer is None:
            raise SecurityDisabled("no authorizer is configured; set authorizer.class.name")
        request.authorize(ResourceType.CLUSTER)
        wanted = acl_filter(request.message)
    except BrokerError as error:
        return DescribeAclsResponse(error_code=error.code, error_message=error.message)
    found = sorted(acl for acl in state.authorizer.acls if wanted.matches(acl))
    by_resource = groupby(found, lambda acl: (acl.resource_type, acl.name, acl.pattern_type))
    return DescribeAclsResponse(
        resources=[
            DescribeAclsResponse.DescribeAclsResource(
                resource_type=resource_type,
                resource_name=name,
                pattern_type=pattern_type,
                acls=[
                    DescribeAclsResponse.AclDescription(
                        principal=acl.principal,
                        host=acl.host,
                        operation=acl.operation,
                        permission_type=acl.permission,
                    )
                    for acl in acls
                ],
            )
            for (resource_type, name, pattern_type), acls in by_resource
        ]
    )


def acl_filter(asked: DescribeAclsRequest | DeleteAclsRequest.DeleteAclsFilter) -> AclFilter:
    """Raises InvalidRequest."""
    try:
        return AclFilter(
            ResourceType(asked.resource_type_filter),
            asked.resource_name_filter,
            PatternType(asked.pattern_type_filter),
            asked.principal_filter,
            asked.host_filter,
            Operation(asked.operation),
            Permission(asked.permission_type),
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
