"""DescribeAcls (key 29), versions 1-3: list the ACLs that match a filter.

Errors: CLUSTER_AUTHORIZATION_FAILED without DESCRIBE on the cluster; INVALID_REQUEST for an unknown type in
the filter; SECURITY_DISABLED without an authorizer. Source: KIP-140; Kafka's KafkaApis.handleDescribeAcls.
"""

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
        pattern = acl_filter(request.message)
    except BrokerError as error:
        return DescribeAclsResponse(error_code=error.code, error_message=error.message)
    matching = sorted(acl for acl in state.authorizer.acls if pattern.matches(acl))
    by_resource = groupby(matching, lambda acl: (acl.resource_type, acl.name, acl.pattern_type))
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


def acl_filter(requested: DescribeAclsRequest | DeleteAclsRequest.DeleteAclsFilter) -> AclFilter:
    """Return the filter of a DescribeAcls or DeleteAcls request.

    Raises InvalidRequest for an unknown resource type, pattern type, operation or permission.
    """
    try:
        return AclFilter(
            ResourceType(requested.resource_type_filter),
            requested.resource_name_filter,
            PatternType(requested.pattern_type_filter),
            requested.principal_filter,
            requested.host_filter,
            Operation(requested.operation),
            Permission(requested.permission_type),
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
