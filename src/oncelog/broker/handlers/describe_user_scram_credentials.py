"""DescribeUserScramCredentials (key 50), version 0: the SCRAM mechanisms of users, never their keys.

A request without users means all users.

Errors: CLUSTER_AUTHORIZATION_FAILED without DESCRIBE on the cluster; RESOURCE_NOT_FOUND for an unknown user;
DUPLICATE_RESOURCE for a user named twice.
Source: KIP-554; Kafka's ScramImage.
"""

from __future__ import annotations

from collections import Counter

from oncelog.broker.request import Answer, Request
from oncelog.broker.state import BrokerState
from oncelog.broker.stepwise import Work, respond_in_steps, sorted_in_steps
from oncelog.errors import BrokerError, DuplicateResource, ResourceNotFound
from oncelog.rules.security.authorization import ResourceType
from oncelog.wire.messages import (
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
)

KEY = 50
ELEMENTS_PER_USER = 2
"""Cost of one user, in elements of a step."""

_Result = DescribeUserScramCredentialsResponse.DescribeUserScramCredentialsResult


def handle(state: BrokerState, request: Request, now_ms: int) -> Answer:
    answer: Answer = respond_in_steps(state.slots, _describe_all(state, request))
    return answer


def _describe_all(state: BrokerState, request: Request) -> Work[DescribeUserScramCredentialsResponse]:
    message: DescribeUserScramCredentialsRequest = request.message
    try:
        request.authorize(ResourceType.CLUSTER)
    except BrokerError as error:
        return DescribeUserScramCredentialsResponse(error_code=error.code, error_message=error.message)
    response, budget = DescribeUserScramCredentialsResponse(results=[]), state.step_budget()
    named = Counter(user.name for user in message.users or ())
    names = named or (yield from sorted_in_steps(state.users.names(), budget))
    for name in names:
        result = _describe(state, name, is_named_twice=named[name] > 1)
        # Without names, leave out a user that was deleted between two steps.
        if named or not result.error_code:
            response.results.append(result)
        if budget.spend(ELEMENTS_PER_USER):
            yield None
    return response


def _describe(state: BrokerState, name: str, *, is_named_twice: bool) -> _Result:
    result = _Result(user=name)
    credentials = list(state.users.of(name))
    if is_named_twice:
        result.error_code, result.error_message = DuplicateResource.code, f"user {name!r} occurs twice"
    elif not credentials:
        result.error_code, result.error_message = ResourceNotFound.code, f"user {name!r} does not exist"
    else:
        result.credential_infos = [
            DescribeUserScramCredentialsResponse.CredentialInfo(
                mechanism=mechanism, iterations=credential.iterations
            )
            for mechanism, credential in credentials
        ]
    return result
