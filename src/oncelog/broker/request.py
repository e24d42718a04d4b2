"""A decoded request with what is known of its client, and the kinds of answer that a handler may return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oncelog.broker.purgatory import Deferred, Disconnect
from oncelog.broker.security.acl_operations import NEEDS
from oncelog.broker.security.authenticator import Door, Farewell
from oncelog.broker.security.authorizer import EVERYTHING, Access, refusal_of
from oncelog.rules.limits.quotas import Payer
from oncelog.rules.security.authorization import CLUSTER_NAME, ResourceType
from oncelog.wire.frames import RequestHeader
from oncelog.wire.messages import Message

Answer = Message | Deferred | Disconnect | Farewell | None
"""None: this request has no response (acks=0)."""


@dataclass(frozen=True, slots=True)
class Request:
    """A decoded request. Its `records` fields are views of the receive buffer, valid while it is handled.

    `client_host` is the client's address in Kafka's form: /127.0.0.1. `door` is the authenticator of the
    connection; without one every operation is allowed and no quota applies.
    """

    connection_id: int
    header: RequestHeader
    message: Any
    client_host: str = ""
    door: Door | None = None

    @property
    def access(self) -> Access:
        """The client's permissions."""
        return EVERYTHING if self.door is None else self.door.access

    @property
    def payer(self) -> Payer | None:
        """The user and client id whose quotas apply; None if the client is not authenticated."""
        return None if self.door is None else self.door.payer(self.header.client_id)

    @property
    def principal(self) -> str:
        """The client's principal, such as User:alice; "" if it is not known."""
        return "" if self.door is None else self.door.principal or ""

    def may(self, resource_type: ResourceType, name: str = CLUSTER_NAME) -> bool:
        """Return True if the client is allowed the operation that this API needs on the resource.

        The operations are in `broker.security.acl_operations`.
        """
        access = self.access
        return access is EVERYTHING or access.may(
            NEEDS[self.message.api.name][resource_type], resource_type, name
        )

    def check(self, resource_type: ResourceType, name: str = CLUSTER_NAME) -> None:
        """Raise the resource's ..._AUTHORIZATION_FAILED unless the client is authorized for it."""
        if not self.may(resource_type, name):
            raise refusal_of(resource_type)
