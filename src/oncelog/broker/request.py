"""A decoded request with what is known of its client, and the kinds of answer that a handler may return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oncelog.broker.purgatory import Disconnect, PendingResponse
from oncelog.broker.security.acl_operations import REQUIRED_OPERATIONS
from oncelog.broker.security.authenticator import Authenticator, CloseAfterResponse
from oncelog.broker.security.authorizer import FULL_ACCESS, Access, refusal_of
from oncelog.rules.limits.quotas import QuotaPrincipal
from oncelog.rules.security.authorization import CLUSTER_NAME, ResourceType
from oncelog.wire.frames import RequestHeader
from oncelog.wire.messages import Message

Answer = Message | PendingResponse | Disconnect | CloseAfterResponse | None
"""None: this request has no response (acks=0)."""


@dataclass(frozen=True, slots=True)
class Request:
    """A decoded request. Its `records` fields are views of the receive buffer, valid while it is handled.

    `client_host` is the client's address in Kafka's form: /127.0.0.1. `authenticator` is that of the
    connection; without one every operation is allowed and no quota applies.
    """

    connection_id: int
    header: RequestHeader
    message: Any
    client_host: str = ""
    authenticator: Authenticator | None = None

    @property
    def access(self) -> Access:
        """The client's permissions."""
        return FULL_ACCESS if self.authenticator is None else self.authenticator.access

    @property
    def quota_principal(self) -> QuotaPrincipal | None:
        """The user and client id whose quotas apply; None if the client is not authenticated."""
        return (
            None if self.authenticator is None else self.authenticator.quota_principal(self.header.client_id)
        )

    @property
    def principal(self) -> str:
        """The client's principal, such as User:alice; "" if it is not known."""
        return "" if self.authenticator is None else self.authenticator.principal or ""

    def is_authorized(self, resource_type: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Return True if the client is allowed the operation that this API needs on the resource.

        The operations are in `broker.security.acl_operations`.
        """
        access = self.access
        return access is FULL_ACCESS or access.may(
            REQUIRED_OPERATIONS[self.message.api.name][resource_type], resource_type, name
        )

    def authorize(self, resource_type: ResourceType, name: str = CLUSTER_NAME) -> None:
        """Raise the resource's ..._AUTHORIZATION_FAILED unless the client is authorized for it."""
        if not self.is_authorized(resource_type, name):
            raise refusal_of(resource_type)
