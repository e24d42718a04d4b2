"""A recording of one scenario: the proxy's events, the client's replies and the records that were stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from oncelog.testing.proxy import BatchSummary, Direction, Fate, WireEvent


class ReplyKind(StrEnum):
    """The first word of a client program's reply.

    OK        the call returned
    ERROR     the call raised an error: one field with its text
    MISSING   the client does not offer this: one field with the reason
    RESULTS   one field for each record that was sent, `VALUE=ok` or `VALUE=ERROR`
    RECORDS   one field for each record that was read
    """

    OK = "ok"
    ERROR = "error"
    MISSING = "missing"
    RESULTS = "results"
    RECORDS = "records"


@dataclass(frozen=True, slots=True)
class Reply:
    """A client program's reply to one command."""

    kind: ReplyKind
    fields: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The fields in one line."""
        return " ".join(self.fields)

    @property
    def results(self) -> dict[str, str]:
        """The result of each record by its value: `ok`, `pending` or the error's text."""
        return dict(part.split("=", 1) for part in self.fields) if self.kind is ReplyKind.RESULTS else {}


def parse_reply(line: str) -> Reply:
    """Return the reply in one line, whose fields have tabs between them. Raises ValueError."""
    kind, *fields = line.rstrip("\r\n").split("\t")
    return Reply(ReplyKind(kind), tuple(text.strip() for text in fields))


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything that a judgement may look at."""

    events: Sequence[WireEvent] = ()
    replies: Mapping[str, Reply] = field(default_factory=dict)
    """Replies by the label that the scenario gave them."""
    stored: tuple[str, ...] = ()
    """Values in the scenario's topic that a read_committed reader gets, by partition and offset."""

    @property
    def results(self) -> dict[str, str]:
        """The result of each sent record by its value, of all replies."""
        return {value: result for reply in self.replies.values() for value, result in reply.results.items()}

    @property
    def acknowledged(self) -> list[str]:
        """The values of acknowledged records, in the order in which they were sent."""
        return [value for value, result in self.results.items() if result == "ok"]

    def requests(self, api: str) -> Iterator[WireEvent]:
        """Yield the client's requests of an API, in order, each once."""
        for event in self.events:
            is_first = event.fate not in _LATER_FATES
            if event.direction is Direction.REQUEST and event.api == api and is_first:
                yield event

    def responses(self, api: str) -> Iterator[WireEvent]:
        """Yield the responses of an API that reached the client, in order."""
        for event in self.events:
            if event.direction is Direction.RESPONSE and event.api == api and event.fate in _DELIVERED:
                yield event

    def note_number(self, text: str) -> int:
        """Return the number of the event with a note. Raises ValueError if there is none."""
        for event in self.events:
            if event.direction is Direction.NOTE and event.detail == text:
                return event.number
        raise ValueError(f"the recording has no note {text!r}")

    def batches(self, *, first: int = 0, end: int | None = None) -> list[BatchSummary]:
        """Return the batches of Produce requests, of events with numbers from `first` to before `end`."""
        return [
            batch
            for event in self.requests("Produce")
            if first <= event.number and (end is None or event.number < end)
            for batch in event.batches
        ]


_LATER_FATES = (Fate.RELEASED, Fate.COPY, Fate.LOST)
_DELIVERED = (Fate.PASSED, Fate.RELEASED, Fate.FORGED)


def highest_versions(events: Sequence[WireEvent]) -> dict[str, int]:
    """Return the highest version that the client used of each API, by the API's name."""
    versions: dict[str, int] = {}
    for event in events:
        if event.direction is Direction.REQUEST:
            versions[event.api] = max(versions.get(event.api, 0), event.api_version)
    return dict(sorted(versions.items()))
