"""Break a rule of Oncelog's broker on purpose, and check that differential fuzzing finds a difference.

Each mutant patches the broker in this process. Random sequences of requests go to this broker and to Apache
Kafka until one of them shows a difference. The exit code is 0 if every mutant is found. `--write` writes the
table of docs/internals/differential-fuzzing.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from differential.brokers import COMMON, SASL, apache_broker  # noqa: E402
from differential.operations import all_subjects, draw  # noqa: E402
from differential.runner import Fixed, Pair  # noqa: E402

import oncelog  # noqa: E402
from oncelog.broker.coordinators import offsets as coordinators_offsets  # noqa: E402
from oncelog.broker.coordinators import transaction_verification, transactions  # noqa: E402
from oncelog.broker.handlers import (  # noqa: E402
    create_partitions,
    create_topics,
    fetch,
    incremental_alter_configs,
    list_transactions,
    offset_commit,
    offset_delete,
    txn_offset_commit,
    write_txn_markers,
)
from oncelog.broker.security import (  # noqa: E402
    authorizer,
    users,
)
from oncelog.errors import BrokerError  # noqa: E402
from oncelog.log import partition  # noqa: E402
from oncelog.rules.groups.classic import ClassicGroup, GroupState  # noqa: E402
from oncelog.rules.groups.consumer import ConsumerGroup  # noqa: E402
from oncelog.rules.idempotence import append  # noqa: E402
from oncelog.rules.limits import quotas  # noqa: E402
from oncelog.rules.security import authorization  # noqa: E402
from oncelog.rules.security.authorization import Acl, AclFilter, AclTable, PatternType, Permission  # noqa: E402

PAGE = ROOT / "docs" / "internals" / "differential-fuzzing.md"
BEGIN, END = "<!-- mutants -->", "<!-- /mutants -->"
JOBS = 3
LISTENERS = {"listeners": f"PLAINTEXT://127.0.0.1:0,{SASL}://127.0.0.1:0"}
"""A plaintext listener, and one on which users authenticate."""


class Mutant(NamedTuple):
    """A deliberate fault. A patch has a module or class, the name of an attribute, and its replacement."""

    name: str
    subject: str
    patches: tuple[tuple[Any, str, Any], ...]


def _wrapped(owner: Any, name: str, change: Callable[..., Any]) -> tuple[Any, str, Any]:
    """Return a patch that replaces `owner.name` by a call of `change(original, *arguments)`."""
    original = getattr(owner, name)
    return owner, name, lambda *args, **kwargs: change(original, *args, **kwargs)


def _without(*names: str) -> Callable[..., Any]:
    """Return a change that calls the original without the named keyword arguments."""

    def change(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **{key: value for key, value in kwargs.items() if key not in names})

    return change


def _false(*_: Any, **__: Any) -> bool:
    return False


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _asking_the_group_first(original: Any, node: Any, message: Any, *more: Any) -> Any:
    group = (message.group_id, message.generation_id, message.member_id, message.group_instance_id)
    node.groups.check_commit(*group, is_transactional=True)
    return original(node, message, *more)


def _leaving_one_by_one(original: Any, group: Any, identities: Any, now_ms: int) -> Any:
    return [code for identity in identities for code in original(group, [identity], now_ms)]


def _complete_without_others(group: Any, now_ms: int) -> None:
    is_open = group.state is GroupState.PREPARING_REBALANCE
    if is_open and any(member.join_callback is not None for member in group.members.values()):
        group._complete(now_ms)


def _without_assignments(original: Any, node: Any, arguments: Any, left_count: int) -> Any:
    arguments.assignments = None
    return original(node, arguments, left_count)


def _always_creating(original: Any, node: Any, request: Any, now_ms: int) -> Any:
    request.message.validate_only = False
    return original(node, request, now_ms)


def _of_any_epoch(original: Any, group: Any, beat: Any) -> Any:
    try:
        return original(group, beat)
    except BrokerError:
        if beat.member_id in group.members and beat.epoch > 0:
            return group.members[beat.member_id]
        raise


COORDINATION: list[Mutant] = [
    Mutant(
        "F75: members that leave in one request leave one by one",
        "classic_groups",
        (_wrapped(ClassicGroup, "leave", _leaving_one_by_one),),
    ),
    Mutant(
        "a member may speak of any generation",
        "classic_groups",
        (
            _wrapped(
                ClassicGroup,
                "_member_error",
                lambda original, self, member_id, instance_id, *_: original(self, member_id, instance_id),
            ),
        ),
    ),
    Mutant(
        "a static member's instance fences nobody",
        "classic_groups",
        (
            _wrapped(
                ClassicGroup,
                "_member_error",
                lambda original, self, member_id, _, *generation: original(
                    self, member_id, None, *generation
                ),
            ),
        ),
    ),
    Mutant(
        "a rebalance waits for nobody",
        "classic_groups",
        ((ClassicGroup, "_complete_if_all_joined", _complete_without_others),),
    ),
    Mutant(
        "a member commits before it has its assignment",
        "classic_groups",
        (
            _wrapped(
                ClassicGroup,
                "commit_error",
                lambda original, *args, **_: original(*args, is_transactional=True),
            ),
        ),
    ),
    Mutant(
        "a member commits at any epoch",
        "consumer_groups",
        ((ConsumerGroup, "_check_epoch", staticmethod(_nothing)),),
    ),
    Mutant(
        "a heartbeat of any epoch is answered",
        "consumer_groups",
        (_wrapped(ConsumerGroup, "_member_of", _of_any_epoch),),
    ),
    Mutant(
        "a member is given what another still has to give up",
        "consumer_groups",
        ((ConsumerGroup, "_held_by_others", lambda *_: set()),),
    ),
    Mutant(
        "a member that leaves raises no epoch",
        "consumer_groups",
        ((ConsumerGroup, "_remove", ConsumerGroup._forget),),
    ),
    Mutant(
        "a static member that leaves for a moment is gone",
        "consumer_groups",
        (
            _wrapped(
                ConsumerGroup,
                "_leave",
                lambda original, self, beat: original(self, beat._replace(epoch=-1))._replace(
                    epoch=beat.epoch
                ),
            ),
        ),
    ),
    Mutant(
        "offsets that are only pending are returned as stable",
        "offsets",
        ((coordinators_offsets.Offsets, "pending_of", lambda *_: set()),),
    ),
    Mutant(
        "a transaction's offset holds over a later plain commit",
        "offsets",
        ((coordinators_offsets, "later", lambda held, materialized: materialized),),
    ),
    Mutant(
        "OffsetDelete forgets what members read",
        "offsets",
        (
            _wrapped(
                offset_delete,
                "_code",
                lambda original, node, request, at, _: original(node, request, at, set()),
            ),
        ),
    ),
    Mutant(
        "F63: metadata is measured in characters",
        "offsets",
        ((offset_commit, "_java_length", len),),
    ),
]
ADMINISTRATION: list[Mutant] = [
    Mutant(
        "F73: a null is no setting, and is left out",
        "admin",
        (
            _wrapped(
                create_topics,
                "check_overrides",
                lambda original, broker, overrides, *more: original(
                    broker, {key: value for key, value in overrides.items() if value is not None}, *more
                ),
            ),
        ),
    ),
    Mutant(
        "topics that are only to be checked are created",
        "admin",
        (_wrapped(create_topics, "_create_all", _always_creating),),
    ),
    Mutant(
        "assignments of new partitions are not looked at",
        "admin",
        (_wrapped(create_partitions, "_validate", _without_assignments),),
    ),
    Mutant(
        "what is appended to a list replaces it",
        "admin",
        (
            _wrapped(
                incremental_alter_configs,
                "_apply",
                lambda original, result, config, _: original(result, config, ""),
            ),
        ),
    ),
    Mutant(
        "what is denied does not outweigh what is allowed",
        "acls",
        (
            _wrapped(
                authorizer,
                "is_allowed",
                lambda original, acls, *args, **kwargs: original(
                    [acl for acl in acls if acl.permission is not Permission.DENY], *args, **kwargs
                ),
            ),
        ),
    ),
    Mutant(
        "no operation implies another",
        "acls",
        ((authorization, "IMPLIED_BY", {}),),
    ),
    Mutant(
        "a prefix speaks of one name only",
        "acls",
        (
            _wrapped(
                AclTable,
                "acls_for",
                lambda original, self, principal, kind, name: [
                    acl
                    for acl in original(self, principal, kind, name)
                    if acl.pattern_type is not PatternType.PREFIXED or acl.name == name
                ],
            ),
        ),
    ),
    Mutant(
        "an ACL holds for every host",
        "acls",
        (_wrapped(Acl, "applies_to", lambda original, self, names, _: original(self, names, self.host)),),
    ),
    Mutant(
        "a filter that matches finds equal names only",
        "acls",
        (
            _wrapped(
                AclFilter,
                "_matches_name",
                lambda original, self, acl: (
                    original(self, acl)
                    and (self.pattern_type is not PatternType.MATCH or self.name in (None, acl.name))
                ),
            ),
        ),
    ),
    Mutant(
        "a strict filter of quotas is not strict",
        "quotas",
        (
            _wrapped(
                quotas.QuotaFilter,
                "matches",
                lambda original, self, entity: original(quotas.QuotaFilter(self.parts, False), entity),
            ),
        ),
    ),
    Mutant(
        "a quota has fractions of bytes",
        "quotas",
        (
            _wrapped(
                quotas,
                "_check_value",
                lambda original, key, value: original(key, float(int(value)) or value),
            ),
        ),
    ),
    Mutant(
        "any number of iterations makes a SCRAM user",
        "quotas",
        ((users, "MIN_ITERATIONS", 1),),
    ),
]
MUTANTS: list[Mutant] = [
    Mutant(
        "F1, C14: a transaction with an epoch of its own begins with any sequence",
        "transactions",
        (_wrapped(partition, "decide_append", _without("begins_epoch", "verification")),),
    ),
    Mutant(
        "F39: a batch overtakes one that the coordinator refused",
        "transactions",
        (_wrapped(partition, "decide_append", _without("verification")),),
    ),
    Mutant(
        "F6: TxnOffsetCommit asks the group before the transaction's coordinator",
        "transactions",
        (_wrapped(txn_offset_commit, "_admit", _asking_the_group_first),),
    ),
    Mutant(
        "F40: a fetch behind the log's end does not learn where the log was cut",
        "records",
        ((fetch._Fetch, "_diverges", _false),),
    ),
    Mutant(
        "F33: ids without a transaction are younger than any duration",
        "transactions",
        (
            _wrapped(
                list_transactions,
                "_is_long",
                lambda original, entry, duration_ms, now_ms: (
                    original(entry, duration_ms, now_ms) and (duration_ms < 0 or entry.start_ms >= 0)
                ),
            ),
        ),
    ),
    Mutant(
        "F36: a partition that knows a newer epoch becomes part of the transaction",
        "transactions",
        (
            (transaction_verification, "knows_newer_epoch", _false),
            (txn_offset_commit, "knows_newer_epoch", _false),
        ),
    ),
    Mutant(
        "F37: a marker of transaction version 2 need not raise the epoch",
        "transactions",
        ((write_txn_markers, "reject_same_epoch", _nothing),),
    ),
    Mutant(
        "an old epoch of a producer is taken by partitions",
        "idempotence",
        ((append, "_check_epoch", _nothing),),
    ),
    Mutant(
        "any sequence follows",
        "idempotence",
        ((append, "_check_sequence", _nothing),),
    ),
    Mutant(
        "sequences wrap one too late",
        "idempotence",
        ((append, "is_next", lambda last, base: base == (0 if last is None else last + 1)),),
    ),
    Mutant(
        "the sequence after next is taken as well",
        "idempotence",
        (
            (
                append,
                "is_next",
                lambda last, base: base == 0 if last is None else 1 <= (base - last) % 2**31 <= 2,
            ),
        ),
    ),
    Mutant(
        "four batches are remembered, not five",
        "idempotence",
        ((append, "REMEMBERED_BATCHES", 4),),
    ),
    Mutant(
        "a repetition is acknowledged with the log's end",
        "idempotence",
        (
            _wrapped(
                partition,
                "decide_append",
                lambda original, *args, **kwargs: (
                    verdict._replace(base_offset=kwargs["base_offset"])
                    if isinstance(verdict := original(*args, **kwargs), append.Duplicate)
                    else verdict
                ),
            ),
        ),
    ),
    Mutant(
        "a repetition is stored again",
        "idempotence",
        ((append, "_find_remembered", _nothing),),
    ),
    Mutant(
        "aborted transactions are not told to readers",
        "records",
        ((fetch, "_aborted", lambda *_: []),),
    ),
    Mutant(
        "every transaction commits",
        "transactions",
        (
            _wrapped(
                transactions.TransactionCoordinator,
                "end",
                lambda original, self, tid, who, is_commit, *rest: original(self, tid, who, True, *rest),
            ),
        ),
    ),
    Mutant(
        "F24: batches of several producers in one request are judged one by one",
        "transactions",
        (
            _wrapped(
                transaction_verification,
                "_transactional_batches",
                lambda original, node, request: _of_one_producer(original(node, request)),
            ),
        ),
    ),
    Mutant(
        "offsets of an aborted transaction are committed",
        "transactions",
        (
            _wrapped(
                coordinators_offsets.Offsets,
                "on_marker",
                lambda original, self, index, producer_id, is_commit: original(
                    self, index, producer_id, True
                ),
            ),
        ),
    ),
    *COORDINATION,
    *ADMINISTRATION,
]


def _of_one_producer(batches: Any) -> Any:
    found = list(batches)
    return iter(row for row in found if row[1] == found[0][1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of mutants' names; all without")
    parser.add_argument("--sequences", type=int, default=400, help="at most so many for each")
    parser.add_argument("--kafka", metavar="HOST:PORT[,HOST:PORT]", help="one that runs")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.names or any(text in m.name for text in arguments.names)]
    with ExitStack() as stack:
        kafka = (
            Fixed(*arguments.kafka.split(",")) if arguments.kafka else stack.enter_context(apache_broker())
        )
        rows = [(mutant, _sequences_until_found(mutant, kafka, arguments.sequences)) for mutant in chosen]
    if arguments.write:
        _write(rows)
    return int(any(found is None for _, found in rows))


def _sequences_until_found(mutant: Mutant, kafka: Any, limit: int) -> int | None:
    """Return the number of sequences that find the mutant, or None if `limit` sequences do not find it.

    A difference counts only if a second run of the same sequence shows it again.
    """
    subject = all_subjects()[mutant.subject]
    drawn = ((draw(subject, seed), subject.rules) for seed in range(limit))
    with ExitStack() as stack:
        broker = stack.enter_context(oncelog.Broker(config=COMMON | LISTENERS))
        for owner, name, instead in mutant.patches:
            stack.enter_context(patch.object(owner, name, instead))
        pair = Pair(Fixed(broker.bootstrap_servers, broker.listeners[SASL]), kafka)
        found = None
        for number, outcome in enumerate(pair.play_all(drawn, JOBS), 1):
            if outcome.difference is not None and pair.confirmed(outcome, subject.rules) is not None:
                found = number
                break
    print(f"{mutant.name}: {f'found by sequence {found}' if found else f'not found in {limit}'}", flush=True)
    return found


def _write(rows: list[tuple[Mutant, int | None]]) -> None:
    lines = ["| mutant | subject | found by sequence |", "| --- | --- | --- |"]
    lines += [f"| {mutant.name} | {mutant.subject} | {found or 'not found'} |" for mutant, found in rows]
    text = PAGE.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
