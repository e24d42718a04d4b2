"""Builds requests about SCRAM users and reads their responses. Source: KIP-554."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from oncelog.errors import raise_for_code
from oncelog.rules.security.scram import Mechanism, salt_password
from oncelog.wire.messages import (
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)

DEFAULT_ITERATIONS = 8_192
"""PBKDF2 iterations for a new password: twice the minimum that Kafka accepts."""


def set_user_request(
    name: str, password: str, mechanism: Mechanism, salt: bytes, iterations: int
) -> AlterUserScramCredentialsRequest:
    """Return a request with the salted hash of a password. The password itself is never sent.

    The hash takes milliseconds of CPU time.
    """
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


def delete_user_request(name: str, mechanism: Mechanism) -> AlterUserScramCredentialsRequest:
    return AlterUserScramCredentialsRequest(
        deletions=[AlterUserScramCredentialsRequest.ScramCredentialDeletion(name=name, mechanism=mechanism)]
    )


def check_users_altered(response: AlterUserScramCredentialsResponse) -> None:
    """Raise the first error in the response; return if all users were altered."""
    for result in response.results:
        raise_for_code(result.error_code, f"user {result.user!r}: {result.error_message or 'refused'}")


def describe_users_request(names: Collection[str] | None) -> DescribeUserScramCredentialsRequest:
    rows = [DescribeUserScramCredentialsRequest.UserName(name=name) for name in names or ()]
    return DescribeUserScramCredentialsRequest(users=rows or None)


def described_users(
    response: DescribeUserScramCredentialsResponse,
) -> Mapping[str, Mapping[Mechanism, int]]:
    """Return the number of PBKDF2 iterations by user and mechanism. Raises BrokerError."""
    raise_for_code(response.error_code, response.error_message or "describing users")
    for row in response.results:
        raise_for_code(row.error_code, row.error_message or f"describing user {row.user!r}")
    return {
        row.user: {Mechanism(info.mechanism): info.iterations for info in row.credential_infos}
        for row in sorted(response.results, key=lambda row: row.user)
    }
