"""A decoded request with what is known of its client, and the kinds of answer that a handler may return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oncelog.broker.purgatory import Disconnect, PendingResponse
from oncelog.broker.security.acl_operations import NEEDS
from oncelog.broker.security.authenticator import Door, Farewell
from oncelog.broker.security.authorizer import EVERYTHING, Access, refusal_of
from oncelog.rules.limits.quotas import Payer
from oncelog.rules.security.authorization import CLUSTER_NAME, ResourceType
from oncelog.wire.frames import RequestHeader
from oncelog.wire.messages import Message

Answer = Message | PendingResponse | Disconnect | Farewell | None
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
    authenticator: Door | None = None

    @property
    def access(self) -> Access:
        """The client's permissions."""
        return EVERYTHING if self.authenticator is None else self.authenticator.access

    @property
    def quota_principal(self) -> Payer | None:
        """The user and client id whose quotas apply; None if the client is not authenticated."""
        return None if self.authenticator is None else self.authenticator.payer(self.header.client_id)

    @property
    def principal(self) -> str:
        """The client's principal, such as User:alice; "" if it is not known."""
        return "" if self.authenticator is None else self.authenticator.principal or ""

    def is_authorized(self, resource_type: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Return True if the client is allowed the operation that this API needs on the resource.

        The operations are in `broker.security.acl_operations`.
        """
        access = self.access
        return access is EVERYTHING or access.may(
            NEEDS[self.message.api.name][resource_type], resource_type, name
        )

    def authorize(self, resource_type: ResourceType, name: str = CLUSTER_NAME) -> None:
        """Raise the resource's ..._AUTHORIZATION_FAILED unless the client is authorized for it."""
        if not self.is_authorized(resource_type, name):
            raise refusal_of(resource_type)
