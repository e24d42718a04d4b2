"""Scenarios in Markdown (tests/scenarios/*.md): read, and run against any broker over real sockets.

A scenario is an H2 with prose, header lines and one fenced block `scenario`. Header lines:
`Rows:` behaviours it shows; `Versions: Fetch 4-12` run once for each of these versions that we offer
(`Versions: Fetch`: all of them), every step of that API at that version, others at their newest;
`Only: oncelog` and `Differs: KEY` where an entry of docs/differences.md says why; `Broker: own` where
the broker is stopped and started.

    topic T partitions=2 cleanup.policy=compact   $T its name, $T.id its id; again: created again
    producer A                                    $A an id at epoch 0; $free, $spare: no topic's name
    on B                                          the steps below use the connection B
    produce T/1 a b by=A seq=0 -> 0               values; -> base offset or error; options as of !batch
    fetch T/1 from=0 -> a b                       -> values or error; `-> nothing`
    produce T a -> oncelog:0 apache:INVALID_RECORD       expected of each broker
    > Fetch {topics: [...]}                       a request; `> Fetch 4 {...}` at a version
    >> Fetch {topics: [...]}                      the same until the answer is as expected, at most 60 s
    > frame {api_key: 99, api_version: 0, body: "00ff"}      raw bytes; tags: hex of the header's tag block
    < {error_code: NONE}                          its answer; `< closed`: the connection ends; `< nothing`
    < ApiVersions 0 {...}                         an answer read as another API's or version's
    <oncelog {...}  <apache {...}                 expected of one broker only
    eventually produce T a -> 0                   any step by name, repeated until it succeeds, at most 60 s
    restart, kill                                 the broker is stopped (SIGTERM, SIGKILL) and started
    wait 0.5                                      seconds
    init, add, end, write, read ...               transactions: see support.scenarios.transactions
    join, sync, heartbeat, leave, commit ...      groups: see support.scenarios.groups

Indented lines go on with the line before. Bodies: see support.scenarios.values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oncelog.broker.state import OFFERED
from oncelog.wire.messages import API_BY_NAME, Api
from support import TESTS

FOLDER = TESTS / "scenarios"

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_HEADER = re.compile(r"^(Rows|Versions|Only|Differs|Broker|Transactions): *(.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```scenario\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REQUEST = re.compile(r"(>>?) *(\w+) *(\d+)? *(\{.*\})")
_APART = re.compile(r"^<\w|\b(oncelog|apache):")
RESPONSE = re.compile(r"<(\w*) *(?:(\w+) +(\d+) +)?(\{.*\}|closed|nothing)")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario; `api` None: its steps run at their newest versions, once."""

    file: str
    title: str
    rows: tuple[str, ...]
    api: Api | None
    versions: tuple[int, ...]
    only: str | None
    differs: str | None
    own_broker: bool
    raises_epoch: bool
    steps: tuple[str, ...]

    @property
    def tells_brokers_apart(self) -> bool:
        """Whether one broker is expected to answer otherwise than the other, or not asked."""
        return self.only is not None or any(_APART.search(step) for step in self.steps)

    def cases(self) -> Iterator[int | None]:
        yield from self.versions or (None,)


def read_scenarios(folder: Path = FOLDER) -> list[Scenario]:
    return [each for path in sorted(folder.glob("*.md")) for each in _read_file(path)]


def _read_file(path: Path) -> Iterator[Scenario]:
    parts = _HEADING.split(path.read_text())[1:]
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        prose, block, _ = _BLOCK.split(text)
        headers = dict(_HEADER.findall(prose))
        api, versions = _versions(headers.get("Versions"))
        yield Scenario(
            file=path.stem,
            title=title.strip(),
            rows=tuple(re.findall(r"\w+", headers.get("Rows", ""))),
            api=api,
            versions=versions,
            only=headers.get("Only"),
            differs=headers.get("Differs"),
            own_broker=headers.get("Broker") == "own",
            raises_epoch=headers.get("Transactions") == "epoch",
            steps=tuple(_steps(block)),
        )


def _versions(text: str | None) -> tuple[Api | None, tuple[int, ...]]:
    """The API and those of the versions named that we offer."""
    if text is None:
        return None, ()
    name, *limits = re.findall(r"\w+", text)
    api = API_BY_NAME[name]
    offered = offered_versions(api)
    first, last = (int(limits[0]), int(limits[-1])) if limits else (offered[0], offered[-1])
    return api, tuple(version for version in offered if first <= version <= last)


def offered_versions(api: Api) -> range:
    return range(api.first_version, OFFERED[api.key].max_version + 1)


def _steps(block: str) -> Iterator[str]:
    lines = [re.sub(r"(^|\s+)#( .*)?$", "", line) for line in block.splitlines()]
    text = "\n".join(line for line in lines if line.strip())
    yield from re.sub(r"\n\s+", " ", text).splitlines()
