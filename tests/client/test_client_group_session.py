"""A member's session against a simulated coordinator: notifications, the commits before notifications, and
fatal errors.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.groups.session import ALL, PROTOCOLS, TOPIC, Coordinator, Member
from support.wait import until

from oncelog.client.consumer.poll_activity import PollActivity
from oncelog.client.group.membership import Change
from oncelog.errors import (
    BrokerError,
    CoordinatorLoadInProgress,
    DisconnectedError,
    FencedInstanceId,
    GroupAuthorizationFailed,
    RebalanceInProgress,
    UnknownMemberId,
    UnknownServerError,
)
from oncelog.types import TopicPartition
from oncelog.wire.messages import (
    ConsumerGroupHeartbeatRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    MetadataResponse,
    OffsetCommitRequest,
)

A, R, L = Change.ASSIGNED, Change.REVOKED, Change.LOST


def beats(coordinator: Coordinator) -> int:
    return sum(
        isinstance(request, (HeartbeatRequest, ConsumerGroupHeartbeatRequest))
        for request in coordinator.requests
    )


def commits(coordinator: Coordinator) -> list[OffsetCommitRequest]:
    return [request for request in coordinator.requests if isinstance(request, OffsetCommitRequest)]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=40)
@given(patience=st.lists(st.integers(0, 12), min_size=1, max_size=30), slowness=st.integers(0, 8))
def test_polls_cancelled_at_any_moment_report_each_change_once(
    protocol: str, patience: list[int], slowness: int
) -> None:
    """Even if polls are cancelled, revoked partitions are committed before the application is notified, and
    notified only once.
    """

    async def work() -> None:
        coordinator = Coordinator()

        async def slow() -> int:
            for _ in range(slowness):
                await asyncio.sleep(0)
            return 0

        coordinator.commit_answer = slow
        member = Member(coordinator, protocol, **{"auto.commit.interval.ms": 1_000_000})
        await member.until(lambda: len(member.core.assignment()) == 4 and len(member.notifications) == 1)
        member.hand_out(7)
        coordinator.rebalance(ALL[:2])
        for turns in patience:
            step = asyncio.create_task(member.step(1.0))
            for _ in range(turns):
                await asyncio.sleep(0)
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)
        await member.until(lambda: any(change is R for change, *_ in member.notifications))
        await member.until(lambda: len(member.core.assignment()) == 2)
        revoked = [
            (partitions, commits) for change, partitions, commits in member.notifications if change is R
        ]
        leaving = [0, 1, 2, 3] if protocol == "range" else [2, 3]
        assert revoked == [(leaving, 1)]
        assert coordinator.committed == [dict.fromkeys(range(4), 7)]
        assert not any(change is L for change, *_ in member.notifications)
        await member.session.close()

    asyncio.run(work())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_silent_coordinator_holds_polls_no_longer_than_their_deadline(protocol: str) -> None:
    """A poll does not wait for an automatic commit.

    It does wait for the commit that precedes a revocation, but only until its own deadline.
    """

    async def work() -> None:
        coordinator = Coordinator()
        never = asyncio.get_running_loop().create_future()

        async def silent() -> int:
            return int(await asyncio.shield(never))

        coordinator.commit_answer = silent
        member = Member(coordinator, protocol, **{"auto.commit.interval.ms": 0})
        await member.until(lambda: len(member.notifications) == 1)
        member.hand_out(5)
        for _ in range(20):
            assert await member.step(), "records are handed out while the commit is under way"
        assert sum(isinstance(request, OffsetCommitRequest) for request in coordinator.requests) <= 1
        coordinator.rebalance(ALL[:2])
        first = beats(coordinator)
        await member.until(lambda: beats(coordinator) > first + 5)
        assert not await member.step(), "nothing is handed out of what is about to go"
        assert [change for change, *_ in member.notifications] == [A], "nor told before the commit has ended"
        never.set_result(0)
        await member.until(lambda: any(change is R for change, *_ in member.notifications))
        assert coordinator.committed[-1] == dict.fromkeys(range(4), 5)
        await member.session.close()

    asyncio.run(work())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_partitions_that_a_commit_before_a_revocation_finds_lost_are_reported_as_lost(protocol: str) -> None:
    async def work() -> None:
        coordinator = Coordinator()

        async def refuse() -> int:
            return 25  # UNKNOWN_MEMBER_ID

        member = Member(coordinator, protocol, **{"auto.commit.interval.ms": 1_000_000})
        await member.until(lambda: len(member.notifications) == 1)
        member.hand_out(5)
        coordinator.commit_answer = refuse
        coordinator.rebalance(ALL[:2])
        await member.until(lambda: len(member.notifications) >= 2)
        assert member.notifications[1] == (L, [0, 1, 2, 3], 0)
        await member.until(lambda: len(member.core.assignment()) == 2)
        assert member.notifications[2] == (A, [0, 1], 0)
        await member.session.close()

    asyncio.run(work())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_late_commit_does_not_overwrite_that_of_the_next_owner(protocol: str) -> None:
    """The coordinator sends no responses during a rebalance, so the member gives up its commit.

    In the next generation, a retry would overwrite the commit of the partitions' next owner.
    """

    async def work() -> None:
        coordinator = Coordinator()
        never = asyncio.get_running_loop().create_future()

        async def first_is_silent() -> int:
            coordinator.commit_answer = coordinator._stored
            return int(await never)

        coordinator.commit_answer = first_is_silent
        member = Member(coordinator, protocol, **{"auto.commit.interval.ms": 0})
        await member.until(lambda: len(member.notifications) == 1)
        member.hand_out(5)
        assert await member.step()
        await member.until(lambda: coordinator.commit_answer == coordinator._stored)
        coordinator.share = ALL[:1]
        coordinator.heartbeat_code = 25 if protocol != "consumer" else 110
        await member.until(lambda: any(change is L for change, *_ in member.notifications))
        coordinator.heartbeat_code = 0
        assert never.cancelled(), "given up"
        await member.until(lambda: len(member.core.assignment()) == 1)
        member.hand_out(9)
        await member.until(lambda: len(coordinator.committed) > 0)
        assert all(set(offsets) == {0} and offsets[0] != 5 for offsets in coordinator.committed)
        await member.session.close()

    asyncio.run(work())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_fenced_instance_id_ends_the_member(protocol: str) -> None:
    """The application is notified of the loss once. Then every poll and commit raises, and the member sends
    no more requests.
    """

    async def work() -> None:
        coordinator = Coordinator()
        member = Member(coordinator, protocol, **{"group.instance.id": "one"})
        await member.until(lambda: len(member.notifications) == 1)
        member.hand_out(5)
        identity = member.session.metadata
        coordinator.heartbeat_code = 82
        with pytest.raises(FencedInstanceId, match=r"has taken over group\.instance\.id='one'"):
            await member.until(lambda: False)
        assert member.notifications[1:] == [(L, [0, 1, 2, 3], 0)]
        request_count = len(coordinator.requests)
        for _ in range(3):
            with pytest.raises(FencedInstanceId):
                await member.step(0.02)
        with pytest.raises(FencedInstanceId):
            await member.session.commit()
        assert member.core.assignment() == []
        assert member.session.metadata == identity, "what is sent in its name is refused"
        await member.session.close()
        assert len(coordinator.requests) == request_count

    asyncio.run(work())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_commit_that_is_fenced_ends_the_member(protocol: str) -> None:
    async def work() -> None:
        coordinator = Coordinator()

        async def fenced() -> int:
            return 82

        member = Member(coordinator, protocol, **{"group.instance.id": "one", "enable.auto.commit": False})
        await member.until(lambda: len(member.notifications) == 1)
        member.hand_out(5)
        coordinator.commit_answer = fenced
        with pytest.raises(FencedInstanceId, match="has taken over"):
            await member.session.commit()
        with pytest.raises(FencedInstanceId, match="has taken over"):
            await member.until(lambda: False)
        assert member.notifications[1:] == [(L, [0, 1, 2, 3], 0)]
        await member.session.close()

    asyncio.run(work())


@pytest.mark.parametrize("protocol", ["range", "cooperative-sticky"])
def test_a_commit_during_a_rebalance_is_raised_and_the_member_takes_part(protocol: str) -> None:
    async def work() -> None:
        coordinator = Coordinator()

        async def rebalancing() -> int:
            return 27

        member = Member(coordinator, protocol, **{"enable.auto.commit": False})
        await member.until(lambda: len(member.notifications) == 1)
        member.hand_out(5)
        generation = coordinator.generation
        coordinator.commit_answer = rebalancing
        with pytest.raises(RebalanceInProgress):
            await member.session.commit()
        coordinator.commit_answer = coordinator._stored
        await member.until(lambda: coordinator.generation > generation and len(member.notifications) > 1)
        assert not any(change is L for change, *_ in member.notifications)
        member.hand_out(6)
        await member.until(lambda: len(member.core.assignment()) == 4)
        await member.session.commit()
        assert coordinator.committed == [dict.fromkeys(range(4), 6)]
        await member.session.close()

    asyncio.run(work())


@pytest.mark.parametrize("code", [22, 25, 82])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_response_to_a_commit_of_an_earlier_generation_does_not_end_the_membership(
    protocol: str, code: int
) -> None:
    async def work() -> None:
        coordinator = Coordinator()
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def late() -> int:
            return await answer

        member = Member(coordinator, protocol, **{"enable.auto.commit": False})
        await member.until(lambda: len(member.notifications) == 1)
        member.hand_out(5)
        coordinator.commit_answer = late
        commit = asyncio.create_task(member.session.commit())
        before = member.session.member.generation_id
        await until(lambda: bool(commits(coordinator)))
        coordinator.rebalance(ALL[:2])
        await member.until(lambda: len(member.core.assignment()) == 2)
        await member.until(lambda: member.session.member.generation_id > before)
        now, notified_count = member.session.member, len(member.notifications)
        answer.set_result(code)
        with pytest.raises(BrokerError):
            await commit
        first = beats(coordinator)
        await member.until(lambda: beats(coordinator) > first + 3)
        assert not any(change is L for change, *_ in member.notifications[notified_count:])
        assert member.session.member.member_id == now.member_id
        assert len(member.core.assignment()) == 2
        await member.session.close()

    asyncio.run(work())


@pytest.mark.parametrize("how", ["commit", "close"])
def test_a_commit_during_a_join_is_stored_in_the_next_generation(how: str) -> None:
    """The group is already in its next generation. The member does not know that yet, and still reads."""

    async def work() -> None:
        coordinator, is_heard = Coordinator(), asyncio.Event()
        request = coordinator.request

        async def late(node_id: int | None, message: Any, **more: Any) -> Any:
            answer = await request(node_id, message, **more)
            if isinstance(message, JoinGroupRequest) and coordinator.generation > 1:
                await is_heard.wait()
            return answer

        async def by_generation() -> int:
            sent = commits(coordinator)[-1].generation_id_or_member_epoch
            return 22 if sent < coordinator.generation else 0

        coordinator.request = late  # type: ignore[method-assign]
        coordinator.commit_answer = by_generation
        member = Member(coordinator, "cooperative-sticky")
        await member.until(lambda: len(member.notifications) == 1)
        member.hand_out(5)
        coordinator.rebalance(ALL)
        await member.until(lambda: coordinator.generation == 2)
        call = asyncio.create_task(getattr(member.session, how)())
        await until(lambda: bool(commits(coordinator)) or call.done())
        is_heard.set()
        await call
        assert coordinator.committed == [dict.fromkeys(range(4), 5)]
        await member.session.close()

    asyncio.run(work())


def test_an_assignment_of_a_lost_generation_is_not_adopted() -> None:
    """The generation is lost after the revocation, and before the member adopts the new assignment."""

    async def work() -> None:
        coordinator = Coordinator()
        member = Member(coordinator, "cooperative-sticky", **{"enable.auto.commit": False})
        await member.until(lambda: len(member.notifications) == 1)
        coordinator.rebalance(ALL[:2])
        await member.until(lambda: any(change is R for change, *_ in member.notifications))
        coordinator.heartbeat_code = 25
        # the response to a heartbeat reports the loss
        await until(lambda: member.session.member.generation_id < 0)
        await member.until(lambda: len(member.notifications) >= 4)
        assert [notification[:2] for notification in member.notifications] == [
            (A, [0, 1, 2, 3]),
            (R, [2, 3]),
            (L, [0, 1]),
            (A, [0, 1]),
        ]
        await member.session.close()

    asyncio.run(work())


@pytest.mark.parametrize("is_changed", [True, False])
def test_partitions_that_a_heartbeat_in_flight_leaves_out_are_not_adopted(is_changed: bool) -> None:
    """The coordinator gives other members the partitions that a member's heartbeat does not report.

    So a member waits for the response to a pending heartbeat before it adopts new partitions.
    """

    async def work() -> None:
        coordinator, answers = Coordinator(), asyncio.Event()
        member = Member(coordinator, "consumer", **{"enable.auto.commit": False})
        ask, sent = coordinator.request, list[ConsumerGroupHeartbeatRequest]()

        async def second_is_lost(node: int | None, request: Any, **more: Any) -> Any:
            if isinstance(request, ConsumerGroupHeartbeatRequest):
                sent.append(request)
                if len(sent) == 2:
                    raise DisconnectedError("cut")
                if len(sent) == 3:
                    await answers.wait()
            return await ask(node, request, **more)

        coordinator.request = second_is_lost  # type: ignore[method-assign]
        await member.step()
        await until(lambda: len(sent) == 3)
        assert (sent[2].member_epoch, sent[2].topic_partitions) == (1, [])
        for _ in range(20):
            assert not await member.step(0.001)
        assert member.core.assignment() == []
        coordinator.share = ALL[:2] if is_changed else list(ALL)
        answers.set()
        await member.until(lambda: bool(member.core.assignment()))
        assert [notification[:2] for notification in member.notifications] == [
            (A, [0, 1] if is_changed else [0, 1, 2, 3])
        ]
        await member.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_heartbeat_names_what_was_taken_before_the_application_knows() -> None:
    async def work() -> None:
        coordinator, is_cut = Coordinator(), False
        member = Member(coordinator, "consumer", **{"enable.auto.commit": False})
        ask, full = coordinator.request, list[ConsumerGroupHeartbeatRequest]()

        async def cut_once(node: int | None, request: Any, **more: Any) -> Any:
            nonlocal is_cut
            if isinstance(request, ConsumerGroupHeartbeatRequest) and member.notifications and not is_cut:
                is_cut = True
                raise DisconnectedError("cut")
            if isinstance(request, ConsumerGroupHeartbeatRequest) and is_cut:
                full.append(request)
            return await ask(node, request, **more)

        coordinator.request = cut_once  # type: ignore[method-assign]
        await member.until(lambda: bool(member.notifications))
        await until(lambda: full)
        (named,) = full[0].topic_partitions or ()
        assert named.partitions == [0, 1, 2, 3]
        await member.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_heartbeat_that_is_not_authorized_is_raised_and_the_member_stays(protocol: str) -> None:
    async def work() -> None:
        coordinator = Coordinator()
        member = Member(coordinator, protocol)
        await member.until(lambda: len(member.notifications) == 1)
        identity = member.session.metadata
        for _ in range(2):
            coordinator.heartbeat_code = 30
            with pytest.raises(GroupAuthorizationFailed):
                await member.until(lambda: False)
            coordinator.heartbeat_code = 0
        first = beats(coordinator)
        await member.until(lambda: beats(coordinator) > first + 2)
        assert len(member.notifications) == 1
        assert len(member.core.assignment()) == 4
        assert member.session.metadata.member_id == identity.member_id
        await member.session.close()

    asyncio.run(work())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_member_whose_poll_waits_is_not_idle_and_one_between_polls_is(protocol: str) -> None:
    async def work() -> None:
        coordinator = Coordinator()
        member = Member(coordinator, protocol, **{"max.poll.interval.ms": 1, "enable.auto.commit": False})
        member.activity.enter()
        await member.until(lambda: len(member.notifications) == 1)
        first = beats(coordinator)
        await member.until(lambda: beats(coordinator) > first + 10)
        assert len(member.notifications) == 1
        member.activity.leave(coordinator.now_ms() - 5)
        await until(lambda: member.session.member.generation_id < 0)  # the member has left
        await member.until(lambda: len(member.notifications) > 1)
        assert member.notifications[1] == (L, [0, 1, 2, 3], 0)
        await member.session.close()

    asyncio.run(work())


def test_idle_time_counts_from_the_end_of_the_last_wait() -> None:
    activity = PollActivity(100)
    assert activity.idle_ms(150) == 50
    activity.enter()
    activity.enter()
    assert activity.idle_ms(9_000) == 0
    activity.leave(9_000)
    assert activity.idle_ms(10_000) == 0, "another poll waits"
    activity.leave(10_000)
    assert activity.idle_ms(10_500) == 500


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_rebalance_compares_few_of_many_partitions(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with 10,000 partitions, one step compared all pairs and kept the application's event loop
    busy for 3.5 s.
    """
    comparisons = 0

    class Counting(TopicPartition):
        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return tuple(self) == other

        __hash__ = TopicPartition.__hash__

    for module in ("client.group.subscription", "client.group.consumer_heartbeat"):
        monkeypatch.setattr(f"oncelog.{module}.TopicPartition", Counting)
    many = [TopicPartition(TOPIC, number) for number in range(500)]

    async def work() -> None:
        coordinator = Coordinator()
        coordinator.share = many[:400]
        member = Member(coordinator, protocol, **{"auto.commit.interval.ms": 1_000_000})
        await member.until(lambda: len(member.core.assignment()) == 400)
        coordinator.rebalance(many[200:])
        await member.until(lambda: member.core.assignment() == many[200:])
        await member.session.close()

    asyncio.run(work())
    assert comparisons < 40 * len(many)


def test_a_static_member_that_is_fenced_while_its_positions_are_looked_up_says_so() -> None:
    """Regression: the waiting poll raised AttributeError instead of the fencing error."""

    async def work() -> None:
        coordinator = Coordinator()
        member = Member(coordinator, "range", **{"group.instance.id": "one"})

        async def held_back(_: Any) -> Any:
            coordinator.heartbeat_code = FencedInstanceId.code
            await asyncio.Event().wait()

        member.session._coordinator.committed = held_back  # type: ignore[method-assign]
        with pytest.raises(FencedInstanceId):
            await member.step(60)
        await member.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))


@pytest.mark.parametrize("then", ["close", "interval", "subscribe"])
def test_an_older_commit_of_partitions_that_are_assigned_again_is_not_repeated(then: str) -> None:
    """Regression: the older commit was sent after a newer one, and the next consumer read records again."""

    async def work() -> None:
        coordinator, is_refused = Coordinator(), asyncio.Event()

        async def first_refused() -> int:
            if len(commits(coordinator)) > 1:
                is_refused.set()
                return 0
            await is_refused.wait()
            return CoordinatorLoadInProgress.code

        coordinator.commit_answer, coordinator.share = first_refused, ALL[1:2]
        interval_ms = 1 if then == "interval" else 1_000_000
        member = Member(coordinator, "range", **{"auto.commit.interval.ms": interval_ms})
        session, core = member.session, member.core
        session.subscribe([])
        core.assign(ALL[:1])
        member.hand_out(10)
        session.commit_before_assigning()
        await until(lambda: bool(commits(coordinator)))
        if then == "subscribe":
            core.assign([])
            session.subscribe([TOPIC])
            is_refused.set()
            await member.until(lambda: core.assignment() == ALL[1:2])
        else:
            core.assign(ALL[:2])
        member.hand_out(50)
        if then == "interval":
            await until(lambda: session.commit_if_due() or ALL[1] in session.automatic_commits)
            is_refused.set()
            await until(lambda: bool(coordinator.committed))
            session.stop()
        else:
            await session.close()
        assert coordinator.committed == ([{0: 10}, {1: 50}] if then == "subscribe" else [{0: 50, 1: 50}])

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_late_heartbeat_response_does_not_affect_the_next_membership() -> None:
    """Regression: the member adopted the epoch of the late response, and waited forever for an assignment."""

    async def work() -> None:
        coordinator, may_answer = Coordinator(), asyncio.Event()
        may_answer.set()
        request = coordinator.request

        async def slow(node_id: int | None, message: Any, **how: Any) -> Any:
            answer = await request(node_id, message, **how)
            if isinstance(message, ConsumerGroupHeartbeatRequest):
                await may_answer.wait()
            return answer

        async def refuse() -> int:
            return UnknownMemberId.code

        coordinator.request = slow  # type: ignore[method-assign]
        member = Member(coordinator, "consumer", **{"enable.auto.commit": False})
        await member.until(lambda: len(member.notifications) == 1)
        may_answer.clear()
        beaten = beats(coordinator)
        await member.until(lambda: beats(coordinator) > beaten)
        member.hand_out(5)
        coordinator.commit_answer = refuse
        with pytest.raises(UnknownMemberId):
            await member.session.commit()
        may_answer.set()
        await member.until(lambda: len(member.core.assignment()) == 4 and len(member.notifications) == 3)
        assert [change for change, *_ in member.notifications] == [A, L, A]
        await member.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_member_joins_again_when_the_application_knows_what_it_has_lost() -> None:
    """Regression: a commit had ended the membership, but the next heartbeat joined again before the
    application knew. The next commit of lost partitions was then accepted.
    """

    async def work() -> None:
        coordinator, other = Coordinator(), Member(Coordinator(), "consumer")

        async def refuse() -> int:
            return UnknownMemberId.code

        member = Member(coordinator, "consumer", **{"enable.auto.commit": False})
        await member.until(lambda: len(member.notifications) == 1)
        await other.until(lambda: len(other.notifications) == 1)
        member.hand_out(5)
        stored, coordinator.commit_answer = coordinator.commit_answer, refuse
        with pytest.raises(UnknownMemberId):
            await member.session.commit()
        coordinator.commit_answer = stored
        beaten = beats(other.coordinator)
        await other.until(
            lambda: beats(other.coordinator) > beaten + 5
        )  # both members send a heartbeat every millisecond, so the first member could have sent one
        with pytest.raises(UnknownMemberId):
            await member.session.commit()
        assert coordinator.committed == []
        await member.until(lambda: len(member.notifications) == 3)
        assert [change for change, *_ in member.notifications] == [A, L, A]
        member.hand_out(7)
        await member.session.commit()
        assert coordinator.committed == [{0: 7, 1: 7, 2: 7, 3: 7}]
        await member.session.close()
        await other.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))


@pytest.mark.parametrize("protocol", ["range", "consumer"])
def test_matches_of_an_older_pattern_do_not_replace_a_subscription(protocol: str) -> None:
    """Regression: the member replaced the topics that the application subscribed to during the look-up of the
    pattern.
    """

    async def work() -> None:
        coordinator, is_asked, may_answer = Coordinator(), asyncio.Event(), asyncio.Event()

        async def fetch_metadata(_: None) -> Any:
            is_asked.set()
            await may_answer.wait()
            row = MetadataResponse.MetadataResponseTopic(name="older", error_code=0, is_internal=False)
            return MetadataResponse(topics=[row])

        coordinator.fetch_metadata = fetch_metadata  # type: ignore[attr-defined]
        member = Member(coordinator, protocol)
        member.session.subscribe([], re.compile("older"))
        await member.until(is_asked.is_set)
        member.session.subscribe([TOPIC])
        may_answer.set()
        await member.until(lambda: len(member.core.assignment()) == 4)
        assert member.session.topics_in_use == {TOPIC}
        await member.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_automatic_commit_that_a_member_gives_up_is_logged(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Only this log event shows that the offsets are not stored. Errors that end the membership are not
    logged.
    """

    async def work() -> None:
        coordinator, codes = Coordinator(), [UnknownServerError.code, RebalanceInProgress.code, 0]

        async def refused() -> int:
            return codes.pop(0) if codes else 0

        coordinator.commit_answer = refused
        member = Member(coordinator, protocol, **{"auto.commit.interval.ms": 1})
        await member.until(lambda: len(member.notifications) == 1)
        member.hand_out(5)
        await member.until(lambda: bool(coordinator.committed))
        await member.session.close()

    with caplog.at_level(logging.WARNING, logger="oncelog.client"):
        asyncio.run(asyncio.wait_for(work(), 120))
    [line] = caplog.messages
    assert "an automatic commit for group 'g' failed: UNKNOWN_SERVER_ERROR" in line
