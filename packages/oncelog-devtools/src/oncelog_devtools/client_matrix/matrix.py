"""Measures clients, and renders the matrix of stored results."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oncelog.errors import OncelogError
from oncelog_devtools.client_matrix.clients import ClientUnderTest
from oncelog_devtools.client_matrix.judgements import ROWS, Cell, Row, Verdict
from oncelog_devtools.client_matrix.program import ClientProgram, ProgramFailed
from oncelog_devtools.client_matrix.recording import Recording, highest_versions
from oncelog_devtools.client_matrix.scenarios import NotOffered, record

API_ORDER = (
    "Produce", "Fetch", "ListOffsets", "Metadata", "FindCoordinator", "InitProducerId", "AddPartitionsToTxn",
    "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn", "JoinGroup", "ConsumerGroupHeartbeat", "ApiVersions",
)  # fmt: skip
"""The APIs whose versions the page shows."""


def measure(
    client: ClientUnderTest, programs: Path, bootstrap_servers: str, broker: str, rows: Sequence[Row] = ROWS
) -> dict[str, Any]:
    """Run the scenarios of `rows` with one client, and return the result to store.

    `broker` is the broker's name for the page. Raises MissingDependency if the client's program cannot be
    built, and ProgramFailed if it cannot say its version.
    """
    command = client.command(programs)
    outcomes: dict[str, Recording | Cell] = {}
    for row in rows:
        if row.scenario not in outcomes:
            outcomes[row.scenario] = _outcome(row.scenario, command, bootstrap_servers)
    cells = {row.key: _cell(row, outcomes[row.scenario]) for row in rows}
    events = [
        event for outcome in outcomes.values() if isinstance(outcome, Recording) for event in outcome.events
    ]
    return {
        "title": client.title,
        "version": _version(command, bootstrap_servers),
        "date": datetime.now(UTC).date().isoformat(),
        "broker": broker,
        "cells": {
            key: {"verdict": str(cell.verdict), "seen": _plain(cell.seen)} for key, cell in cells.items()
        },
        "versions": highest_versions(events),
    }


def _outcome(scenario: str, command: Sequence[str], bootstrap_servers: str) -> Recording | Cell:
    """Return the recording of a scenario, or the cell of one that could not be recorded."""
    try:
        return record(scenario, command, bootstrap_servers)
    except NotOffered as reason:
        return Cell(Verdict.NOT_OFFERED, str(reason))
    except OncelogError as error:
        return Cell(Verdict.UNCLEAR, str(error))


def _cell(row: Row, outcome: Recording | Cell) -> Cell:
    return row.judge(outcome) if isinstance(outcome, Recording) else outcome


def _version(command: Sequence[str], bootstrap_servers: str) -> str:
    with (
        tempfile.TemporaryDirectory() as directory,
        ClientProgram(command, bootstrap_servers, Path(directory) / "client.log") as program,
    ):
        reply = program.expect("version")
    if not reply.fields:
        raise ProgramFailed("the program did not say its version")
    return reply.fields[0]


def _plain(text: str) -> str:
    """Return the text without the parts that differ in each run. Unprintable characters are escaped."""
    text = "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
    text = re.sub(r"matrix-[a-z-]+-[0-9a-f]{8}", "matrix-...", text)
    text = re.sub(r"(?i)\b(producer ?id)\W+\d+", r"\1 ...", text)
    text = re.sub(r"\b(127\.0\.0\.1|localhost|\[::1\]):\d+", r"\1:...", text)
    return text if len(text) <= 220 else f"{text[:220]}..."


def render(results: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]] = ()) -> str:
    """Return the generated part of the page: the matrix, the versions, and the observations of each client.

    `others` are results on another broker, which are compared with those of the same client.
    """
    names = [f"{result['title']} {result['version']}" for result in results]
    lines = _table("behaviour", names, [("*checked on*", [result["date"] for result in results])])
    for row in ROWS:
        cells = [result["cells"][row.key]["verdict"] for result in results]
        lines.append(_line(row.title, cells))
    lines += ["", *_comparison(results, others)]
    lines += ["", *_table("highest version used", names, [])]
    for api in API_ORDER:
        lines.append(_line(api, [str(result["versions"].get(api, "")) for result in results]))
    for result, name in zip(results, names, strict=True):
        lines += ["", f"### Client {name}", "", f"Seen on {result['broker']}, {result['date']}.", ""]
        lines += ["| behaviour | | seen |", "| --- | --- | --- |"]
        for row in ROWS:
            cell = result["cells"][row.key]
            lines.append(_line(row.title, [cell["verdict"], _escaped(cell["seen"])]))
    return "\n".join(lines)


def _comparison(results: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines about the cells that are different on another broker."""
    lines: list[str] = []
    known = {result["title"]: result for result in results}
    for other in others:
        result, name = known[other["title"]], f"{other['title']} {other['version']}"
        pairs = [(row, result["cells"][row.key], other["cells"][row.key]) for row in ROWS]
        for row, cell, there in pairs:
            if cell["verdict"] != there["verdict"]:
                seen = f"{there['verdict']} ({_escaped(there['seen'])})"
                lines.append(f"- {name}, {row.title}: {seen} on {other['broker']}, {other['date']}")
    if others and not lines:
        places = sorted({f"{other['broker']} ({other['date']})" for other in others})
        count = len(others) * len(ROWS)
        lines.append(f"The {count} cells of {len(others)} clients are the same on {', '.join(places)}.")
    return lines


def _table(corner: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    head = [_line(corner, names), f"| --- |{' --- |' * len(names)}"]
    return head + [_line(title, cells) for title, cells in rows]


def _line(title: str, cells: Sequence[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return re.sub(r"([|<>*_\[\]])", r"\\\1", text)
