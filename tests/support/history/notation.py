"""The notation of histories and anomalies in tests/tables/history.txt."""

from __future__ import annotations

import re

from oncelog_simulator.history.check import Anomaly, Cycle, Item, Kind, Operation, Outcome

_OUTCOMES = {"": Outcome.OK, "!": Outcome.FAIL, "?": Outcome.UNKNOWN}
_WHO = re.compile(r"(\w+)(?:/(\w+))?(?:\.(\w+))?")
_RECORD = re.compile(r"(\w)(?:@(\d+))?=(\w+)")


def parse_history(text: str) -> list[Operation]:
    return [_parse(index, words) for index, words in enumerate(text.split(",")) if words]


def _parse(index: int, text: str) -> Operation:
    who, what, *rest = text.split()
    process, session, transaction = _WHO.fullmatch(who).groups()
    begin, end = 10 * index, 10 * index + 5
    if rest and re.fullmatch(r"\d+-\d+", rest[-1]):
        begin, end = map(int, rest.pop().split("-"))
    items = [_RECORD.fullmatch(each).groups() for each in rest]
    return Operation(
        process,
        session,
        Kind(what.rstrip("!?")),
        _OUTCOMES[what[len(what.rstrip("!?")) :]],
        begin,
        end,
        tuple(
            Item(topic, 0, None if offset is None else int(offset), value) for topic, offset, value in items
        ),
        transaction,
    )


def format_anomaly(anomaly: Anomaly) -> str:
    what = anomaly.kinds if isinstance(anomaly, Cycle) else anomaly.item.value
    return f"{type(anomaly).__name__} {what}"
