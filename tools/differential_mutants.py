"""Break a rule of our broker on purpose, and see whether differential fuzzing notices.

Each mutant patches our broker, which runs in this process, and is played against Apache Kafka until a
sequence shows a difference. Exit code 0 when every mutant is found. `--write` puts the table into
docs/internals/differential-fuzzing.md.
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

from differential.beds import SETTINGS, apache_bed  # noqa: E402
from differential.operations import all_subjects, draw  # noqa: E402
from differential.runner import Fixed, Pair  # noqa: E402

import oncelog  # noqa: E402
from oncelog.broker import admission, offsets, transactions  # noqa: E402
from oncelog.broker.apis import fetch, list_transactions, txn_offset_commit, write_txn_markers  # noqa: E402
from oncelog.log import partition  # noqa: E402
from oncelog.rules import append  # noqa: E402

PAGE = ROOT / "docs" / "internals" / "differential-fuzzing.md"
BEGIN, END = "<!-- mutants -->", "<!-- /mutants -->"
JOBS = 3


class Mutant(NamedTuple):
    """`patches`: owner, attribute, and what stands there instead."""

    name: str
    subject: str
    patches: tuple[tuple[Any, str, Any], ...]


def _wrapped(owner: Any, name: str, change: Callable[..., Any]) -> tuple[Any, str, Any]:
    """A patch that calls `change(original, *arguments)`."""
    original = getattr(owner, name)
    return owner, name, lambda *args, **kwargs: change(original, *args, **kwargs)


def _without(*names: str) -> Callable[..., Any]:
    """Call the original without these keyword arguments."""

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
                "_is_chosen",
                lambda original, entry, message, now_ms: (
                    original(entry, message, now_ms) and (message.duration_filter < 0 or entry.start_ms >= 0)
                ),
            ),
        ),
    ),
    Mutant(
        "F36: a partition that knows a newer epoch becomes part of the transaction",
        "transactions",
        ((admission, "knows_newer_epoch", _false), (txn_offset_commit, "knows_newer_epoch", _false)),
    ),
    Mutant(
        "F37: a marker of transaction version 2 need not raise the epoch",
        "transactions",
        ((write_txn_markers, "refuse_same_epoch", _nothing),),
    ),
    Mutant(
        "an old epoch of a producer is taken by partitions",
        "idempotence",
        ((append, "_refuse_epoch", _nothing),),
    ),
    Mutant(
        "any sequence follows",
        "idempotence",
        ((append, "_refuse_sequence", _nothing),),
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
                admission,
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
                offsets.Offsets,
                "on_marker",
                lambda original, self, index, producer_id, is_commit: original(
                    self, index, producer_id, True
                ),
            ),
        ),
    ),
]


def _of_one_producer(batches: Any) -> Any:
    found = list(batches)
    return iter(row for row in found if row[1] == found[0][1])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of mutants' names; all without")
    parser.add_argument("--sequences", type=int, default=400, help="at most so many for each")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker that runs already")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    chosen = [m for m in MUTANTS if not asked.names or any(text in m.name for text in asked.names)]
    with ExitStack() as stack:
        kafka = Fixed(asked.kafka) if asked.kafka else stack.enter_context(apache_bed())
        rows = [(mutant, _sequences_until_found(mutant, kafka, asked.sequences)) for mutant in chosen]
    if asked.write:
        _write(rows)
    return int(any(found is None for _, found in rows))


def _sequences_until_found(mutant: Mutant, kafka: Any, limit: int) -> int | None:
    """How many sequences were played until one showed the mutant, confirmed."""
    subject = all_subjects()[mutant.subject]
    drawn = ((draw(subject, seed), subject.rules) for seed in range(limit))
    with ExitStack() as stack:
        broker = stack.enter_context(oncelog.Broker(config=SETTINGS))
        for owner, name, instead in mutant.patches:
            stack.enter_context(patch.object(owner, name, instead))
        pair = Pair(Fixed(broker.bootstrap_servers), kafka)
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
