"""DeleteAcls (key 31), versions 1-3: remove the ACLs that filters take, in one write.

31 without ALTER of the cluster, 42 unknown kinds, 44 filters that take the same ACLs again and again, 54 no
ACLs. They are looked for in steps: each filter without a name looks at all of them.
"""

from __future__ import annotations

from oncelog.broker.handlers.describe_acls import acl_filter
from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import StepBudget, Work, answer_in_steps
from oncelog.errors import BrokerError, KafkaStorageError, PolicyViolation, SecurityDisabled, StorageError
from oncelog.rules.security.authorization import Acl, AclFilter, AclTable, ResourceType
from oncelog.wire.messages import DeleteAclsRequest, DeleteAclsResponse

KEY = 31
MAX_REPEATED = 10_000
"""How many more matches than ACLs an answer may list: it repeats an ACL for each filter that matches it."""

_Result = DeleteAclsResponse.DeleteAclsFilterResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = answer_in_steps(state.slots, _answer(state, request))
    return answer


def _answer(state: BrokerState, request: Request) -> Work[DeleteAclsResponse]:
    message: DeleteAclsRequest = request.message
    try:
        if state.authorizer is None:
            raise SecurityDisabled("no authorizer is configured; set authorizer.class.name")
        request.authorize(ResourceType.CLUSTER)
        wanted = [_filter(each) for each in message.filters]
        found = yield from _find(state, state.authorizer.acls, wanted)
        state.authorizer.remove({acl for each in found if not isinstance(each, BrokerError) for acl in each})
    except (BrokerError, StorageError) as error:
        refusal = error if isinstance(error, BrokerError) else KafkaStorageError(str(error))
        return DeleteAclsResponse(filter_results=[_refused(refusal) for _ in message.filters])
    return DeleteAclsResponse(
        filter_results=[_refused(each) if isinstance(each, BrokerError) else _removed(each) for each in found]
    )


def _find(
    state: BrokerState, table: AclTable, wanted: list[AclFilter | BrokerError]
) -> Work[list[list[Acl] | BrokerError]]:
    """Return what each filter takes of a table that others replace, not change. Raises PolicyViolation."""
    budget, left_count = StepBudget(state.limits.request_step_elements), len(table) + MAX_REPEATED
    result: list[list[Acl] | BrokerError] = []
    for each in wanted:
        if isinstance(each, BrokerError):
            result.append(each)
            continue
        taken: list[Acl] = []
        for acl in table.candidates(each):
            if each.matches(acl):
                taken.append(acl)
            if budget.spend():
                yield None
        left_count -= len(taken)
        if left_count < 0:
            raise PolicyViolation("the filters take the same ACLs too often; delete with fewer at a time")
        result.append(taken)
        if budget.spend():
            yield None
    return result


def _filter(asked: DeleteAclsRequest.DeleteAclsFilter) -> AclFilter | BrokerError:
    try:
        return acl_filter(asked)
    except BrokerError as error:
        return error


def _refused(error: BrokerError) -> _Result:
    return _Result(error_code=error.code, error_message=error.message)


def _removed(acls: list[Acl]) -> _Result:
    return _Result(
        matching_acls=[
            DeleteAclsResponse.DeleteAclsMatchingAcl(
                resource_type=acl.resource_type,
                resource_name=acl.name,
                pattern_type=acl.pattern_type,
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission,
            )
            for acl in acls
        ]
    )
