"""Count lost and doubled rows by their ids, and judge a run. No I/O."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

EXIT_CLEAN, EXIT_ERROR, EXIT_VIOLATED = 0, 1, 3
_SHOWN = 5
"""The number of ids that are kept as examples."""


def row_id(row: Mapping[str, Any], name: str) -> str | None:
    """Return the id of a row of the target; None if it has none.

    The id is in the column `name`. Without this column, it is the field `name` of a JSON object in the column
    `value`, or else the column `key`.
    """
    if row.get(name) is not None:
        return _text(row[name])
    value = row.get("value")
    if isinstance(value, str | bytes):
        try:
            fields = json.loads(value)
        except ValueError:
            fields = None
        if isinstance(fields, dict) and fields.get(name) is not None:
            return _text(fields[name])
    return None if row.get("key") is None else _text(row["key"])


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


@dataclass(frozen=True, slots=True)
class Counts:
    """The rows of a target, compared with the ids that were sent.

    `doubled` counts the copies beyond the first one of each id. `foreign` counts rows whose id was not sent,
    and rows without an id. The examples are the first few ids.
    """

    found: int
    lost: int
    doubled: int
    foreign: int
    lost_examples: tuple[str, ...] = ()
    doubled_examples: tuple[str, ...] = ()


def count(sent: Iterable[int], found: Iterable[str | None]) -> Counts:
    """Compare the ids that were sent with the ids of the target's rows."""
    times = Counter(found)
    wanted = [str(number) for number in sent]
    lost = [name for name in wanted if name not in times]
    doubled = [name for name in wanted if times[name] > 1]
    known = sum(times[name] for name in wanted)
    return Counts(
        found=times.total(),
        lost=len(lost),
        doubled=sum(times[name] - 1 for name in doubled),
        foreign=times.total() - known,
        lost_examples=tuple(lost[:_SHOWN]),
        doubled_examples=tuple(doubled[:_SHOWN]),
    )


class Verdict(StrEnum):
    """The judgement of one run.

    CLEAN        the fault happened, and every row is in the target once
    VIOLATED     a row is missing, or there more than once
    NOT_REACHED  the fault did not happen, so the run proves nothing
    IMPOSSIBLE   the fault cannot happen with this pipeline, so nothing remains to be proved
    FAILED       the run did not finish, or its rows cannot be recognised
    """

    CLEAN = "clean"
    VIOLATED = "violated"
    NOT_REACHED = "fault did not happen"
    IMPOSSIBLE = "cannot happen"
    FAILED = "failed"


def judge(
    counts: Counts | None, *, has_happened: bool, error: str | None, is_possible: bool = True
) -> Verdict:
    """Judge a run. `counts` is None if the target was not read. `error` says why the run did not finish."""
    if error is not None or counts is None:
        return Verdict.FAILED
    if counts.foreign:
        # Without known ids, every row would count as lost, and a doubled one could hide among foreign rows.
        return Verdict.FAILED
    if counts.lost or counts.doubled:
        return Verdict.VIOLATED
    if not is_possible:
        return Verdict.IMPOSSIBLE
    return Verdict.CLEAN if has_happened else Verdict.NOT_REACHED


def foreign_text(counts: Counts, name: str) -> str | None:
    """Return an error's text if rows of the target have ids that were not sent; None if there are none."""
    if not counts.foreign:
        return None
    return (
        f"{counts.foreign} of {counts.found} rows of the target have no id that was sent: keep the id in a "
        f"column or JSON field {name!r} or in the key, or name it with --id"
    )


def exit_code(verdicts: Iterable[Verdict]) -> int:
    """Return the exit code of a trial: 3 if any run was violated, 0 if all are clean, otherwise 1.

    Runs whose fault cannot happen do not count, unless there are no others.
    """
    found = set(verdicts)
    if Verdict.VIOLATED in found:
        return EXIT_VIOLATED
    return EXIT_CLEAN if found - {Verdict.IMPOSSIBLE} == {Verdict.CLEAN} else EXIT_ERROR
