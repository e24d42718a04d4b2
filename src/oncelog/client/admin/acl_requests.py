"""Builds requests about ACLs and reads their responses. Source: KIP-11, KIP-290."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from oncelog.errors import raise_for_code
from oncelog.rules.security.authorization import (
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from oncelog.wire.messages import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
)


def create_acls_request(acls: Collection[Acl]) -> CreateAclsRequest:
    return CreateAclsRequest(
        creations=[
            CreateAclsRequest.AclCreation(
                resource_type=acl.resource_type,
                resource_name=acl.name,
                resource_pattern_type=acl.pattern_type,
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission,
            )
            for acl in acls
        ]
    )


def check_acls_created(response: CreateAclsResponse, acls: Collection[Acl]) -> None:
    """Raise the first error in the response; return if all ACLs were created."""
    for acl, result in zip(acls, response.results, strict=False):
        raise_for_code(result.error_code, f"{acl_text(acl)}: {result.error_message or 'refused'}")


def describe_acls_request(acl_filter: AclFilter) -> DescribeAclsRequest:
    return DescribeAclsRequest(**_filter_fields(acl_filter))


def described_acls(response: DescribeAclsResponse) -> list[Acl]:
    """Return the ACLs of a response, sorted. Raises BrokerError."""
    raise_for_code(response.error_code, response.error_message or "describing ACLs")
    return sorted(
        Acl(
            ResourceType(resource.resource_type),
            resource.resource_name,
            PatternType(resource.pattern_type),
            acl.principal,
            acl.host,
            Operation(acl.operation),
            Permission(acl.permission_type),
        )
        for resource in response.resources
        for acl in resource.acls
    )


def delete_acls_request(filters: Collection[AclFilter | Acl]) -> DeleteAclsRequest:
    rows = [DeleteAclsRequest.DeleteAclsFilter(**_filter_fields(acl_filter)) for acl_filter in filters]
    return DeleteAclsRequest(filters=rows)


def _filter_fields(acl_filter: AclFilter | Acl) -> dict[str, Any]:
    """Return a filter as the fields that DescribeAcls and DeleteAcls requests share."""
    return {
        "resource_type_filter": acl_filter.resource_type,
        "resource_name_filter": acl_filter.name,
        "pattern_type_filter": acl_filter.pattern_type,
        "principal_filter": acl_filter.principal,
        "host_filter": acl_filter.host,
        "operation": acl_filter.operation,
        "permission_type": acl_filter.permission,
    }


def deleted_acls(response: DeleteAclsResponse) -> list[Acl]:
    """Return the deleted ACLs of a response, sorted. Raises the first error of a filter or an ACL."""
    return sorted(set(_deleted(response)))


def _deleted(response: DeleteAclsResponse) -> Iterator[Acl]:
    for result in response.filter_results:
        raise_for_code(result.error_code, result.error_message or "deleting ACLs")
        for acl in result.matching_acls:
            raise_for_code(acl.error_code, acl.error_message or "deleting an ACL")
            yield Acl(
                ResourceType(acl.resource_type),
                acl.resource_name,
                PatternType(acl.pattern_type),
                acl.principal,
                acl.host,
                Operation(acl.operation),
                Permission(acl.permission_type),
            )


def acl_text(acl: Acl) -> str:
    """Return an ACL as one line of text, such as "allow User:ann READ on TOPIC orders"."""
    name = f"{acl.name}*" if acl.pattern_type is PatternType.PREFIXED else acl.name
    host = "" if acl.host == "*" else f" from {acl.host}"
    verb = acl.permission.name.lower()
    return f"{verb} {acl.principal}{host} {acl.operation.name} on {acl.resource_type.name} {name}"
