"""DeleteAcls (key 31), versions 1-3: delete the ACLs that match filters, in one write.

    CLUSTER_AUTHORIZATION_FAILED  without ALTER on the cluster
    INVALID_REQUEST               an unknown type in a filter
    POLICY_VIOLATION              too many filters match the same ACLs (MAX_REPEATED)
    SECURITY_DISABLED             there is no authorizer

The search runs in steps, because a filter without a name examines all ACLs. It stops if the client
disconnects; the deletion does not. See test_the_search_of_acls_to_delete_stops_if_its_client_disconnects.
Source: KIP-140; Kafka's AclControlManager.
"""

from __future__ import annotations

from itertools import chain

from oncelog.broker.handlers.describe_acls import acl_filter
from oncelog.broker.request import Answer, Request
from oncelog.broker.security.authorizer import Authorizer
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Continuation, Work, respond_in_steps
from oncelog.errors import BrokerError, KafkaStorageError, PolicyViolation, SecurityDisabled, StorageError
from oncelog.rules.security.authorization import Acl, AclFilter, AclTable, ResourceType
from oncelog.wire.messages import DeleteAclsRequest, DeleteAclsResponse

KEY = 31
MAX_REPEATED = 10_000
"""The maximum number of matches in a response, minus the number of ACLs that exist.

The response repeats an ACL for each filter that matches it.
"""

_Result = DeleteAclsResponse.DeleteAclsFilterResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    state.round_meter.fill_round()
    answer: Answer = respond_in_steps(state.slots, _search(state, request))
    return answer


def _search(state: BrokerState, request: Request) -> Work[DeleteAclsResponse | Continuation]:
    """Find the ACLs, and return the Continuation that deletes them, or the errors."""
    message: DeleteAclsRequest = request.message
    authorizer = state.authorizer
    try:
        if authorizer is None:
            raise SecurityDisabled("no authorizer is configured; set authorizer.class.name")
        request.authorize(ResourceType.CLUSTER)
        filters = [_filter(requested) for requested in message.filters]
        matches = yield from _find(state, authorizer.acls, filters)
    except BrokerError as error:
        return DeleteAclsResponse(filter_results=[_error_result(error) for _ in message.filters])
    return Continuation(
        lambda: respond_in_steps(state.slots, _delete(state, authorizer, matches), is_cancellable=False)
    )


def _delete(
    state: BrokerState, authorizer: Authorizer, matches: list[list[Acl] | BrokerError]
) -> Work[DeleteAclsResponse]:
    found = (match for match in matches if isinstance(match, list))
    try:
        yield from authorizer.remove_in_steps(chain.from_iterable(found))
    except StorageError as error:
        refusal = KafkaStorageError(str(error))
        return DeleteAclsResponse(filter_results=[_error_result(refusal) for _ in matches])
    response, budget = DeleteAclsResponse(filter_results=[]), state.step_budget()
    for match in matches:
        result = _error_result(match) if isinstance(match, BrokerError) else _Result()
        response.filter_results.append(result)
        for acl in match if isinstance(match, list) else ():
            result.matching_acls.append(_matching_acl(acl))
            if budget.spend():
                yield None
        if budget.spend():
            yield None
    return response


def _find(
    state: BrokerState, table: AclTable, filters: list[AclFilter | BrokerError]
) -> Work[list[list[Acl] | BrokerError]]:
    """Return for each filter the ACLs that match it, or the filter's own error.

    Raises PolicyViolation if the filters match too many ACLs in total. Another request may change the table
    between two steps.
    """
    budget, remaining_count = state.step_budget(), len(table) + MAX_REPEATED
    result: list[list[Acl] | BrokerError] = []
    for pattern in filters:
        if isinstance(pattern, BrokerError):
            result.append(pattern)
            continue
        matching: list[Acl] = []
        for acl in list(table.candidates(pattern)):
            if pattern.matches(acl):
                matching.append(acl)
            if budget.spend():
                yield None
        remaining_count -= len(matching)
        if remaining_count < 0:
            raise PolicyViolation(
                "too many of the filters match the same ACLs; use fewer filters in one request"
            )
        result.append(matching)
        if budget.spend():
            yield None
    return result


def _filter(requested: DeleteAclsRequest.DeleteAclsFilter) -> AclFilter | BrokerError:
    try:
        return acl_filter(requested)
    except BrokerError as error:
        return error


def _error_result(error: BrokerError) -> _Result:
    return _Result(error_code=error.code, error_message=error.message)


def _matching_acl(acl: Acl) -> DeleteAclsResponse.DeleteAclsMatchingAcl:
    return DeleteAclsResponse.DeleteAclsMatchingAcl(
        resource_type=acl.resource_type,
        resource_name=acl.name,
        pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission,
    )
