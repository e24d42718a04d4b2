"""ACLs and SCRAM users without I/O: requests, and what the answers say."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from oncelog.errors import raise_for_code
from oncelog.rules.security.authorization import (
    Acl,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
)
from oncelog.rules.security.scram import Mechanism, salt_password
from oncelog.wire.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)

DEFAULT_ITERATIONS = 8_192
"""Of PBKDF2, twice the least that Kafka takes."""


def create_acls(acls: Collection[Acl]) -> CreateAclsRequest:
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


def check_created(response: CreateAclsResponse, acls: Collection[Acl]) -> None:
    """Raises the first error."""
    for acl, result in zip(acls, response.results, strict=False):
        raise_for_code(result.error_code, f"{acl_text(acl)}: {result.error_message or 'refused'}")


def describe_acls(wanted: AclFilter) -> DescribeAclsRequest:
    return DescribeAclsRequest(
        resource_type_filter=wanted.resource_type,
        resource_name_filter=wanted.name,
        pattern_type_filter=wanted.pattern_type,
        principal_filter=wanted.principal,
        host_filter=wanted.host,
        operation=wanted.operation,
        permission_type=wanted.permission,
    )


def described_acls(response: DescribeAclsResponse) -> list[Acl]:
    """Raises BrokerError."""
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


def delete_acls(filters: Collection[AclFilter | Acl]) -> DeleteAclsRequest:
    return DeleteAclsRequest(
        filters=[
            DeleteAclsRequest.DeleteAclsFilter(
                resource_type_filter=wanted.resource_type,
                resource_name_filter=wanted.name,
                pattern_type_filter=wanted.pattern_type,
                principal_filter=wanted.principal,
                host_filter=wanted.host,
                operation=wanted.operation,
                permission_type=wanted.permission,
            )
            for wanted in filters
        ]
    )


def deleted_acls(response: DeleteAclsResponse) -> list[Acl]:
    """Raises the first error."""
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


def set_user(
    name: str, password: str, mechanism: Mechanism, salt: bytes, iterations: int
) -> AlterUserScramCredentialsRequest:
    """The password itself is not sent. Takes milliseconds."""
    return AlterUserScramCredentialsRequest(
        upsertions=[
            AlterUserScramCredentialsRequest.ScramCredentialUpsertion(
                name=name,
                mechanism=mechanism,
                iterations=iterations,
                salt=salt,
                salted_password=salt_password(mechanism, password, salt, iterations),
            )
        ]
    )


def delete_user(name: str, mechanism: Mechanism) -> AlterUserScramCredentialsRequest:
    return AlterUserScramCredentialsRequest(
        deletions=[AlterUserScramCredentialsRequest.ScramCredentialDeletion(name=name, mechanism=mechanism)]
    )


def check_altered(response: AlterUserScramCredentialsResponse) -> None:
    """Raises the first error."""
    for result in response.results:
        raise_for_code(result.error_code, f"user {result.user!r}: {result.error_message or 'refused'}")


def describe_users(names: Collection[str] | None) -> DescribeUserScramCredentialsRequest:
    rows = [DescribeUserScramCredentialsRequest.UserName(name=name) for name in names or ()]
    return DescribeUserScramCredentialsRequest(users=rows or None)


def described_users(
    response: DescribeUserScramCredentialsResponse,
) -> Mapping[str, Mapping[Mechanism, int]]:
    """User -> mechanism -> iterations. Raises BrokerError."""
    raise_for_code(response.error_code, response.error_message or "describing users")
    for row in response.results:
        raise_for_code(row.error_code, row.error_message or f"describing user {row.user!r}")
    return {
        row.user: {Mechanism(info.mechanism): info.iterations for info in row.credential_infos}
        for row in sorted(response.results, key=lambda row: row.user)
    }


def acl_text(acl: Acl) -> str:
    """One line, as people say it."""
    name = f"{acl.name}*" if acl.pattern_type is PatternType.PREFIXED else acl.name
    host = "" if acl.host == "*" else f" from {acl.host}"
    verb = acl.permission.name.lower()
    return f"{verb} {acl.principal}{host} {acl.operation.name} on {acl.resource_type.name} {name}"
