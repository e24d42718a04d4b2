"""Read and write the notation of tests/tables/append.txt and marker.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator

from oncelog.rules.idempotence.append import ProducedBatch, ProducerEntry, RememberedBatch
from oncelog.rules.idempotence.sequence import SEQUENCE_MAX
from support import TESTS

TABLES = TESTS / "tables"
NOW_MS, BATCH_MS = 1_000, 500


def rows(name: str) -> Iterator[tuple[str, ...]]:
    for line in (TABLES / name).read_text().splitlines():
        if line and not line.startswith("#"):
            yield tuple(cell.strip() for cell in line.split("|"))


def parse_entry(text: str) -> ProducerEntry | None:
    if text == "-":
        return None
    epoch, coordinator_epoch, txn, batches = None, None, None, []
    for word in text.split():
        if word.startswith("e"):
            epoch = None if word == "e?" else int(word[1:])
        elif word.startswith("c"):
            coordinator_epoch = int(word[1:])
        elif word.startswith("txn@"):
            txn = int(word[4:])
        else:
            batches.append(_parse_remembered(word))
    return ProducerEntry(epoch, coordinator_epoch, BATCH_MS, NOW_MS, txn, tuple(batches))


def _parse_remembered(word: str) -> RememberedBatch:
    if match := re.fullmatch(r"none@(\d+)\+(\d+)", word):
        offset, count = map(int, match.groups())
        return RememberedBatch(None, offset + count - 1, count - 1, BATCH_MS)
    first, last, offset = map(int, re.fullmatch(r"(\d+)-(\d+)@(\d+)", word).groups())
    delta = (last - first) & SEQUENCE_MAX
    return RememberedBatch(last, offset + delta, delta, BATCH_MS)


def format_entry(entry: ProducerEntry) -> str:
    words = [f"e{'?' if entry.producer_epoch is None else entry.producer_epoch}"]
    for batch in entry.batches:
        if batch.last_sequence is None:
            words.append(f"none@{batch.first_offset}+{batch.offset_delta + 1}")
        else:
            words.append(f"{batch.first_sequence}-{batch.last_sequence}@{batch.first_offset}")
    if entry.current_txn_first_offset is not None:
        words.append(f"txn@{entry.current_txn_first_offset}")
    if entry.coordinator_epoch is not None:
        words.append(f"c{entry.coordinator_epoch}")
    return " ".join(words)


def parse_batch(text: str) -> ProducedBatch:
    epoch, sequence, count, flag = re.fullmatch(r"e(\d+) (\d+|none)\+(\d+)(t?)", text).groups()
    base = None if sequence == "none" else int(sequence)
    return ProducedBatch(7, int(epoch), base, int(count) - 1, BATCH_MS, flag == "t")
