"""AlterUserScramCredentials (key 51), version 0: add, replace and remove SCRAM users' credentials.

31 without ALTER of the cluster, 33 an unknown mechanism, 91 nothing to delete, 92 a user named twice,
93 iterations, salt or name that will not do. One answer for each user.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from oncelog.errors import BrokerError, DuplicateResource, KafkaStorageError, StorageError
from oncelog.rules.authorization import ResourceType
from oncelog.wire.messages import AlterUserScramCredentialsRequest, AlterUserScramCredentialsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 51

_Result = AlterUserScramCredentialsResponse.AlterUserScramCredentialsResult


def handle(node: Node, request: Request, now_ms: int) -> AlterUserScramCredentialsResponse:
    message: AlterUserScramCredentialsRequest = request.message
    named = Counter(each.name for each in message.deletions)
    named.update(each.name for each in message.upsertions)
    results = []
    for name, count in named.items():
        result = _Result(user=name)
        try:
            request.check(ResourceType.CLUSTER)
            if count > 1:
                raise DuplicateResource(f"user {name!r} is named twice; one change to it in a request")
            _alter(node, message, name)
        except BrokerError as error:
            result.error_code, result.error_message = error.code, error.message
        except StorageError as error:
            result.error_code, result.error_message = KafkaStorageError.code, str(error)
        results.append(result)
    return AlterUserScramCredentialsResponse(results=results)


def _alter(node: Node, message: AlterUserScramCredentialsRequest, name: str) -> None:
    node.users.alter(
        name,
        [each.mechanism for each in message.deletions if each.name == name],
        [
            (each.mechanism, each.salt, each.salted_password, each.iterations)
            for each in message.upsertions
            if each.name == name
        ],
    )
