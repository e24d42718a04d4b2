"""Scenarios in Markdown (`scenarios/*.md`), which run on any broker over real sockets.

A scenario is an H2 with prose, header lines, and one fenced block `scenario` with a step per line. Indented
lines continue the line before. Header lines:

    Rows: I7 I8              behaviours that the scenario shows
    Versions: Fetch 4-12     run once for each of these versions that we offer (`Versions: Fetch`: for all);
                             every step of that API uses that version, other steps the newest of their API
    Only: oncelog            run on one broker only
    Differs: KEY             the brokers differ on purpose; KEY is an entry of docs/differences.md
    Broker: own              the scenario has its own broker, which it may restart
    Transactions: epoch      the steps of transactions use the protocol of KIP-890

Steps:

    topic T partitions=2 cleanup.policy=compact   $T is its name, $T.id its id; a second time: created again
    producer A                                    $A is a new producer id at epoch 0
    on B                                          later steps use the connection B
    produce T/1 a b by=A seq=0 -> 0               values a and b: the base offset or an error; options
                                                  as !batch
    fetch T/1 from=0 -> a b                       values, `nothing`, or an error
    produce T a -> oncelog:0 apache:INVALID_RECORD       a different result for each broker
    > Fetch {topics: [...]}                       a request; `> Fetch 4 {...}` in a version
    >> Fetch {topics: [...]}                      repeated until the response is as expected
    > frame {api_key: 99, api_version: 0, body: "00ff"}  raw bytes; tags: hex of the header's tag block
    < {error_code: NONE}                          the response; `< closed`: no response, and the connection
                                                  ends; `< nothing`: no response
    < ApiVersions 0 {...}                         the response, decoded as another API or version
    <oncelog {...}  <apache {...}                 the response of one broker
    eventually produce T a -> 0                   any step above, repeated until it succeeds
    wait 0.5                                      a pause in seconds
    init, add, end, write, read ...               transactions: see oncelog.conform.transaction_steps

Tests add steps: `restart` and `kill` stop the broker and start it; `join`, `sync` and others are about
groups.

No topic has the names $free and $spare. `oncelog.conform.values` describes the bodies in braces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oncelog.wire.messages import API_BY_NAME, Api

FOLDER = Path(__file__).parent / "scenarios"

_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_HEADER = re.compile(r"^(Rows|Versions|Only|Differs|Broker|Transactions): *(.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```scenario\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REQUEST = re.compile(r"(>>?) *(\w+) *(\d+)? *(\{.*\})")
_BROKER_NAME = re.compile(r"^<\w|\b(oncelog|apache):")
RESPONSE = re.compile(r"<(\w*) *(?:(\w+) +(\d+) +)?(\{.*\}|closed|nothing)")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario. If `api` is None, it runs once, and each step uses the newest version of its API."""

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
    def expects_different_responses(self) -> bool:
        """Return True if the scenario expects different responses from the two brokers, or runs on one of
        them only.
        """
        return self.only is not None or any(_BROKER_NAME.search(step) for step in self.steps)

    def cases(self) -> Iterator[int | None]:
        """Yield the versions to run the scenario with; a single None if each step uses the newest version."""
        yield from self.versions or (None,)


def read_scenarios(*folders: Path) -> list[Scenario]:
    """Return the scenarios of all files in these folders, ordered by file name. Without folders, read this
    package's scenarios.
    """
    paths = [path for folder in folders or (FOLDER,) for path in folder.glob("*.md")]
    return [scenario for path in sorted(paths, key=lambda path: path.name) for scenario in _read_file(path)]


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
    """Return the API of a `Versions:` header, and the named versions that Oncelog's broker offers."""
    if text is None:
        return None, ()
    name, *limits = re.findall(r"\w+", text)
    api = API_BY_NAME[name]
    offered = offered_versions(api)
    first, last = (int(limits[0]), int(limits[-1])) if limits else (offered[0], offered[-1])
    return api, tuple(version for version in offered if first <= version <= last)


def offered_versions(api: Api) -> range:
    """Return the versions of an API that Oncelog's broker offers."""
    return range(api.first_version, api.max_version + 1)


def _steps(block: str) -> Iterator[str]:
    lines = [re.sub(r"(^|\s+)#( .*)?$", "", line) for line in block.splitlines()]
    text = "\n".join(line for line in lines if line.strip())
    yield from re.sub(r"\n\s+", " ", text).splitlines()
