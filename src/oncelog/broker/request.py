"""A decoded request with its client's identity, and the answers that a handler may return."""

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
"""A handler's answer. None means no response (acks=0)."""


@dataclass(frozen=True, slots=True)
class Request:
    """A decoded request and the connection that it came from.

    - `message`: the decoded body. Its `records` fields are views of the receive buffer, and are valid only
      until `handle` returns.
    - `client_host`: the client's address in Kafka's notation: /127.0.0.1.
    - `authenticator`: the connection's authenticator. If None, everything is allowed and no quota applies.
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
        """The user and client id that determine the quotas; None without an authenticator."""
        return (
            None if self.authenticator is None else self.authenticator.quota_principal(self.header.client_id)
        )

    @property
    def principal(self) -> str:
        """The client's principal, such as User:alice; "" before authentication."""
        return "" if self.authenticator is None else self.authenticator.principal or ""

    def is_authorized(self, resource_type: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Return True if the client may perform this API's operation on the resource.

        `broker.security.acl_operations` has the operation of each API.
        """
        access = self.access
        return access is FULL_ACCESS or access.may(
            REQUIRED_OPERATIONS[self.message.api.name][resource_type], resource_type, name
        )

    def authorize(self, resource_type: ResourceType, name: str = CLUSTER_NAME) -> None:
        """Raise the ..._AUTHORIZATION_FAILED error of the resource type unless the client is authorized."""
        if not self.is_authorized(resource_type, name):
            raise refusal_of(resource_type)
