"""AlterUserScramCredentials (key 51), version 0: add, replace and remove SCRAM users' credentials.

31 without ALTER of the cluster, 33 an unknown mechanism, 91 nothing to delete, 92 a user named twice,
93 iterations, salt or name that will not do. One answer for each user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.users import UserChange
from oncelog.errors import BrokerError, DuplicateResource, KafkaStorageError, StorageError
from oncelog.rules.authorization import ResourceType
from oncelog.wire.messages import AlterUserScramCredentialsRequest, AlterUserScramCredentialsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Node, Request

KEY = 51

_Result = AlterUserScramCredentialsResponse.AlterUserScramCredentialsResult


def handle(node: Node, request: Request, now_ms: int) -> AlterUserScramCredentialsResponse:
    message: AlterUserScramCredentialsRequest = request.message
    deletions: dict[str, list[int]] = {}
    upsertions: dict[str, list[tuple[int, bytes, bytes, int]]] = {}
    for one in message.deletions:
        deletions.setdefault(one.name, []).append(one.mechanism)
    for each in message.upsertions:
        credential = each.mechanism, each.salt, each.salted_password, each.iterations
        upsertions.setdefault(each.name, []).append(credential)
    results = {name: _Result(user=name) for name in (*deletions, *upsertions)}
    sound: list[UserChange] = []
    for name, result in results.items():
        change = name, deletions.get(name, []), upsertions.get(name, [])
        try:
            request.check(ResourceType.CLUSTER)
            if len(change[1]) + len(change[2]) > 1:
                raise DuplicateResource(f"user {name!r} is named twice; one change to it in a request")
        except BrokerError as error:
            _refuse(result, error)
        else:
            sound.append(change)
    try:
        errors = node.users.alter_all(sound)
    except StorageError as error:
        errors = [KafkaStorageError(str(error))] * len(sound)
    for (name, *_), refusal in zip(sound, errors, strict=True):
        if refusal is not None:
            _refuse(results[name], refusal)
    return AlterUserScramCredentialsResponse(results=list(results.values()))


def _refuse(result: _Result, error: BrokerError) -> None:
    result.error_code, result.error_message = error.code, error.message
