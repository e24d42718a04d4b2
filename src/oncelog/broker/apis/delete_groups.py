"""DeleteGroups (key 42), versions 0-2: groups without members, with their offsets.

NON_EMPTY_GROUP (members), GROUP_ID_NOT_FOUND. A group named twice is answered once, as by Kafka.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oncelog.broker.state_topic import Written, answer_when_durable
from oncelog.errors import BrokerError
from oncelog.rules.authorization import ResourceType
from oncelog.wire.messages import DeleteGroupsRequest, DeleteGroupsResponse

if TYPE_CHECKING:
    from oncelog.broker.node import Answer, Node, Request

KEY = 42


def handle(node: Node, request: Request, now_ms: int) -> Answer:
    message: DeleteGroupsRequest = request.message
    written: list[Written] = []

    def delete(group_id: str) -> int:
        try:
            request.check(ResourceType.GROUP, group_id)
            done = node.groups.delete(group_id, now_ms)
        except BrokerError as error:
            return error.code
        written.extend([done] if done else [])
        return 0

    answer = DeleteGroupsResponse(
        results=[
            DeleteGroupsResponse.DeletableGroupResult(group_id=group_id, error_code=delete(group_id))
            for group_id in dict.fromkeys(message.groups_names)
        ]
    )

    def refusal(error: BrokerError) -> DeleteGroupsResponse:
        for result in answer.results:
            result.error_code = result.error_code or error.code
        return answer

    return answer_when_durable(node, written, answer, refusal)
