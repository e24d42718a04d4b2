"""The order of a consumer's commits: one after the other, with other calls and faults in between."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from support.groups.session import ALL, PROTOCOLS, Coordinator, Member
from support.wait import until

from oncelog.client.group.membership import Change
from oncelog.errors import CoordinatorLoadInProgress, MisuseError, RebalanceInProgress, UnknownMemberId
from oncelog.types import OffsetAndMetadata, TopicPartition
from oncelog.wire.messages import JoinGroupRequest, OffsetCommitRequest

R, L = Change.REVOKED, Change.LOST


def at(*offsets: int) -> dict[TopicPartition, OffsetAndMetadata]:
    return {tp: OffsetAndMetadata(offset) for tp, offset in zip(ALL, offsets, strict=False)}


class Commits(Coordinator):
    """A coordinator that answers the first commits with the error codes `codes`, and later ones with
    success.

    It waits for `may_answer` before each response.
    """

    def __init__(self, *codes: int) -> None:
        super().__init__()
        self.codes, self.may_answer = list(codes), asyncio.Event()
        self.may_answer.set()
        self.commit_answer = self._answer

    async def _answer(self) -> int:
        code = self.codes.pop(0) if self.codes else 0
        await self.may_answer.wait()
        return code

    @property
    def sent(self) -> int:
        return sum(isinstance(request, OffsetCommitRequest) for request in self.requests)


async def joined(coordinator: Coordinator, protocol: str, **settings: Any) -> Member:
    member = Member(coordinator, protocol, **{"auto.commit.interval.ms": 1_000_000, **settings})
    await member.until(lambda: len(member.notifications) == 1)
    return member


async def commit_to_be_repeated(
    protocol: str, offsets: dict[TopicPartition, OffsetAndMetadata]
) -> tuple[Commits, Member, asyncio.Task[None]]:
    """Start a commit that the coordinator answers with COORDINATOR_LOAD_IN_PROGRESS, so that it is repeated
    after 300 ms.

    Return the coordinator, the member and the commit's task.
    """
    coordinator = Commits(CoordinatorLoadInProgress.code)
    member = await joined(coordinator, protocol, **{"enable.auto.commit": False})
    coordinator.retry_pause_ms = lambda _: 300.0  # type: ignore[method-assign]
    commit = asyncio.create_task(member.session.commit(offsets))
    await until(lambda: bool(coordinator.sent))
    return coordinator, member, commit


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_commit_before_a_revocation_is_not_repeated_behind_one_of_the_application(protocol: str) -> None:
    """Regression: the application called seek() to go back, and committed. A retry of the earlier commit
    replaced that offset, and the partition's next owner skipped records.
    """

    async def work() -> None:
        coordinator = Commits(CoordinatorLoadInProgress.code)
        member = await joined(coordinator, protocol)
        member.hand_out(7)
        coordinator.retry_pause_ms = lambda _: 200.0  # type: ignore[method-assign]
        coordinator.rebalance([])
        await member.until(lambda: bool(coordinator.sent))
        await member.session.commit(at(3, 3, 3, 3))
        await member.until(lambda: any(change is R for change, *_ in member.notifications))
        assert coordinator.committed == [dict.fromkeys(range(4), 3)]
        await member.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_commits_of_several_tasks_are_stored_in_the_order_of_the_calls(protocol: str) -> None:
    """Regression: a retry of the first commit was sent after the second one, and the group's position went
    back.
    """

    async def work() -> None:
        coordinator = Commits(CoordinatorLoadInProgress.code)
        member = await joined(coordinator, protocol)
        first = asyncio.create_task(member.session.commit(at(5)))
        await until(lambda: bool(coordinator.sent))
        await member.session.commit(at(7))
        await first
        assert coordinator.committed == [{0: 5}, {0: 7}]
        await member.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_commit_that_is_repeated_is_not_sent_for_partitions_that_were_given_back(protocol: str) -> None:
    """Regression: the repeated commit was sent in the next generation, and overwrote the commit of the next
    owner.
    """

    async def work() -> None:
        coordinator, member, commit = await commit_to_be_repeated(protocol, at(5, 5, 5, 5))
        coordinator.rebalance(ALL[:1])
        await member.until(lambda: len(member.core.assignment()) == 1)
        with pytest.raises(RebalanceInProgress):
            await commit
        assert coordinator.sent == 1
        await member.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_commit_that_is_repeated_is_not_sent_for_partitions_that_were_lost(protocol: str) -> None:
    """The member loses its partitions and joins again before the retry is due."""

    async def work() -> None:
        coordinator, member, commit = await commit_to_be_repeated(protocol, at(5))
        coordinator.heartbeat_code = 25 if protocol != "consumer" else 110
        await member.until(lambda: any(change is L for change, *_ in member.notifications))
        coordinator.heartbeat_code = 0
        await member.until(lambda: member.session.member.generation_id >= 0)
        with pytest.raises(UnknownMemberId):
            await commit
        assert coordinator.sent == 1
        await member.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("call", ["commit", "rebalance", "close", "unsubscribe in another task"])
def test_an_explicit_commit_does_not_wait_behind_an_automatic_one(protocol: str, call: str) -> None:
    """The response to an automatic commit is lost. Waiting for it would take 30 s, but a close has only 5
    s.
    """

    async def work() -> None:
        coordinator = Commits()
        member = await joined(coordinator, protocol, **{"auto.commit.interval.ms": 0})
        member.hand_out(5)
        coordinator.may_answer.clear()
        await member.until(lambda: coordinator.sent == 1)
        member.hand_out(7)

        def is_revoked() -> bool:
            return any(change is R for change, *_ in member.notifications)

        match call:
            case "commit":
                task: Any = asyncio.create_task(member.session.commit())
            case "rebalance":
                coordinator.rebalance([])
                task = asyncio.create_task(member.until(is_revoked))
            case _:
                task = asyncio.create_task(member.session.close())
        await until(lambda: coordinator.sent == 2)
        coordinator.may_answer.set()
        await task
        assert coordinator.committed[-1] == dict.fromkeys(range(4), 7)
        await member.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("code", [0, CoordinatorLoadInProgress.code])
def test_a_commit_that_is_cancelled_at_any_await_delays_no_later_one(protocol: str, code: int) -> None:
    """A cancelled commit is not repeated after a later one either."""

    async def work() -> None:
        before = asyncio.all_tasks()
        for turns in range(12):
            coordinator = Commits(code, code)
            member = await joined(coordinator, protocol)
            member.hand_out(3)
            commit = asyncio.create_task(member.session.commit(at(5)))
            for _ in range(turns):
                await asyncio.sleep(0)
            commit.cancel()
            await asyncio.gather(commit, return_exceptions=True)
            await member.session.commit(at(7))
            assert coordinator.committed[-1] == {0: 7}
            sent = coordinator.sent
            await member.session.close()
            assert coordinator.sent == sent + 1, "by the close alone"
            assert coordinator.committed[-1] == dict.fromkeys(range(4), 3)
            await until(lambda: asyncio.all_tasks() == before)

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_commit_that_a_close_ends_says_so() -> None:
    async def work() -> None:
        coordinator = Commits()
        member = await joined(coordinator, "range", **{"enable.auto.commit": False})
        coordinator.may_answer.clear()
        commit = asyncio.create_task(member.session.commit(at(5)))
        await until(lambda: coordinator.sent == 1)
        closing = asyncio.create_task(member.session.close())
        await asyncio.sleep(0)
        assert not commit.done(), "a close waits for it for a while"
        member.session.stop()
        with pytest.raises(MisuseError, match="closed"):
            await commit
        await closing

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_close_waits_for_a_commit_of_another_task() -> None:
    async def work() -> None:
        coordinator = Commits()
        member = await joined(coordinator, "range", **{"enable.auto.commit": False})
        coordinator.may_answer.clear()
        commit = asyncio.create_task(member.session.commit(at(5)))
        await until(lambda: coordinator.sent == 1)
        closing = asyncio.create_task(member.session.close())
        await asyncio.sleep(0)
        coordinator.may_answer.set()
        await asyncio.gather(commit, closing)
        assert coordinator.committed == [{0: 5}]

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_commit_that_cannot_be_sent_is_raised_and_the_next_one_is_sent() -> None:
    async def work() -> None:
        coordinator = Commits()
        member = await joined(coordinator, "range", **{"enable.auto.commit": False})
        send, coordinator.request = coordinator.request, _refuse  # type: ignore[method-assign]
        with pytest.raises(OverflowError):
            await member.session.commit(at(1 << 70))
        coordinator.request = send  # type: ignore[method-assign]
        await member.session.commit(at(7))
        assert coordinator.committed == [{0: 7}]
        await member.session.close()

    async def _refuse(*_: Any, **__: Any) -> Any:
        raise OverflowError("as of a number that a request cannot hold")

    asyncio.run(asyncio.wait_for(work(), 120))


class SlowRebalance(Commits):
    """A coordinator whose group waits for another member: `may_join` ends the rebalance."""

    def __init__(self) -> None:
        super().__init__()
        self.may_join = asyncio.Event()
        self.may_join.set()

    async def request(self, node_id: int | None, request: Any, **fields: Any) -> Any:
        if isinstance(request, JoinGroupRequest):
            await self.may_join.wait()
        return await super().request(node_id, request, **fields)


async def rejoining(coordinator: SlowRebalance, protocol: str) -> Member:
    """Return a member that has given up its partitions, and whose JoinGroup waits for another member."""
    member = await joined(coordinator, protocol, **{"enable.auto.commit": False})
    coordinator.may_join.clear()
    coordinator.rebalance([])
    if protocol == "range":
        await member.until(lambda: any(change is R for change, *_ in member.notifications))
    else:  # the first join takes all partitions away, and the second one waits
        coordinator.may_join.set()
        await member.until(lambda: any(change is R for change, *_ in member.notifications))
        coordinator.may_join.clear()
    await member.until(lambda: member.session.protocol.is_rebalancing)
    return member


@pytest.mark.parametrize("protocol", ["range", "cooperative-sticky"])
def test_a_commit_during_a_rebalance_without_partitions_is_refused_at_once(protocol: str) -> None:
    """R1711: the commit waited behind the member's JoinGroup, for up to request.timeout.ms. Then it raised
    TimedOut, and closed the connection on which the member was joining.
    """

    async def work() -> None:
        coordinator = SlowRebalance()
        member = await rejoining(coordinator, protocol)
        with pytest.raises(RebalanceInProgress):
            await asyncio.wait_for(member.session.commit(at(5)), 20)
        assert not coordinator.sent
        coordinator.share = ALL[:1]
        coordinator.may_join.set()
        await member.until(lambda: bool(member.core.assignment()))
        await member.session.commit(at(7))
        assert coordinator.committed == [{0: 7}]
        await member.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))


class InOrder(SlowRebalance):
    """Such a coordinator that handles the requests of each connection one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def request(self, node_id: int | None, request: Any, **fields: Any) -> Any:
        async with self._connections[fields.get("channel", "")]:
            return await super().request(node_id, request, **fields)


@pytest.mark.parametrize("protocol", ["range", "cooperative-sticky"])
def test_committed_offsets_are_returned_during_a_rebalance_without_partitions(protocol: str) -> None:
    """R1732: `committed` waited behind the member's JoinGroup, and after request.timeout.ms it raised
    TimedOut, and closed the connection on which the member was joining.
    """

    async def work() -> None:
        coordinator = InOrder()
        member = await rejoining(coordinator, protocol)
        assert await asyncio.wait_for(member.session.committed(ALL), 20) == {}
        assert member.session.protocol.is_rebalancing
        coordinator.share = ALL[:1]
        coordinator.may_join.set()
        await member.until(lambda: bool(member.core.assignment()))
        assert await member.session.committed(ALL) == {}
        await member.session.close()

    asyncio.run(asyncio.wait_for(work(), 120))
