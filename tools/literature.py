"""Write the pages with figures: docs/literature.md, and the guides of docs/guides.toml.

docs/literature.md has the claims of docs/literature.toml with verdicts, commands, tests and figures.

Figures come from bench/results. So the pages are stale after a measurement, until `make reference`.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from oncelog_bench import in_flight
from oncelog_bench.framework import figure
from oncelog_bench.page import machine_line, number, percentage

ROOT = Path(__file__).resolve().parents[1]
CLAIMS_FILE = ROOT / "docs" / "literature.toml"
PAGE_FILE = ROOT / "docs" / "literature.md"
GUIDES_FILE = ROOT / "docs" / "guides.toml"
RESULTS = ROOT / "bench" / "results"

_VERDICTS = {"true": "True", "wrong": "Wrong"}

Claim = Mapping[str, Any]
BUSY = (
    " The machine was busy with other\nprograms meanwhile. So only a link is shown on which waiting decides, "
    "and not loopback, where processor time does."
)


def load() -> tuple[dict[str, dict[str, str]], dict[str, Claim]]:
    """Return the sources by letter, and the claims by id (A1, A2, ...), in the file's order."""
    data = _data()
    counts: dict[str, int] = {}
    claims: dict[str, Claim] = {}
    for claim in data["claim"]:
        letter = claim["source"]
        counts[letter] = counts.get(letter, 0) + 1
        claims[f"{letter}{counts[letter]}"] = claim
    return data["sources"], claims


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(CLAIMS_FILE.read_text())


def render() -> str:
    """Return docs/literature.md."""
    sources, claims = load()
    page = _data()["page"]
    wrong = [name for name, claim in claims.items() if claim["verdict"] == "wrong"]
    since = sum("since" in claim for claim in claims.values())
    parts = [page["preamble"]]
    parts += [f"- **{letter}**: {source['title']}. {source['about']}." for letter, source in sources.items()]
    always = f"{len(claims) - len(wrong) - since} are true, {since} are true since a version"
    parts.append(f"\nOf {len(claims)} claims, {always}, and {len(wrong)} are wrong.")
    parts.append(f"Wrong are: {', '.join(wrong)}.\n")
    parts.append(_filled(page["contradictions"], _numbers(claims)))
    for letter, source in sources.items():
        parts.append(f"## {letter}. {source['title']}\n")
        parts += [_claim(name, claim) for name, claim in claims.items() if name[0] == letter]
    tables = {
        "speed-table": _speed_table(),
        "findings": " ".join(in_flight.sentences(_result("in_flight"))),
        "memory-table": _memory_table(),
        "sizing-table": _sizing_table(),
        "conditions": "" if 0 in _result("in_flight")["plan"]["round_trips_ms"] else BUSY,
        "machine": machine_line(_result("in_flight")["machine"]),
    }
    parts += [_filled(text, tables) for text in (page["why_five"], page["sizing"])]
    parts.append(page["acks_1"])
    return "\n".join(parts)


def render_guides() -> dict[Path, str]:
    """Return the text of each guide with figures, by its file."""
    texts = tomllib.loads(GUIDES_FILE.read_text())
    return {ROOT / "docs" / "guides" / f"{name}.md": _filled(text, {}) for name, text in texts.items()}


def _claim(name: str, claim: Claim) -> str:
    verdict = _VERDICTS[claim["verdict"]] + (f" since {claim['since']}" if "since" in claim else "")
    tests = ", ".join(f"`{test}`" for test in claim["tests"])
    return (
        f"**{name}** {claim['says']}\n\n*{verdict}.* {reason_of(claim)}\n\n"
        f"Command: `{claim['command']}`. Tests: {tests}.\n"
    )


def reason_of(claim: Claim) -> str:
    """Return the reason for a claim's verdict, with the measured figures filled in."""
    return _filled(claim["reason"], {})


def _numbers(claims: Mapping[str, Claim]) -> dict[str, str]:
    """Return a map from names to ids, for the claims that have a name."""
    return {claim["name"]: number for number, claim in claims.items() if "name" in claim}


def _filled(text: str, texts: Mapping[str, str]) -> str:
    """Replace each part in braces: by its entry in `texts`, or else by the figure that it describes."""
    return re.sub(
        r"\{([^{}]+)\}", lambda match: texts[match[1]] if match[1] in texts else figure_of(match[1]), text
    )


@cache
def _result(name: str) -> Mapping[str, Any]:
    result: Mapping[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def figure_of(description: str) -> str:
    """Return a measured figure as text. `description` is `RESULT METRIC FIELD=VALUE ...`.

    `as=loss`, `as=gain`, `as=inverse` and `times=N` convert the figure. Raises ValueError if it was not
    measured.
    """
    name, metric, *words = shlex.split(description)
    where: dict[str, Any] = {}
    how: dict[str, str] = {}
    for word in words:
        # The value may contain another "=", as in mode=acks=1.
        field, _, value = word.partition("=")
        if field in ("as", "times"):
            how[field] = value
        else:
            where[field] = int(value) if value.isdigit() else value
    value = _measured(name, metric, where)
    match how.get("as"):
        case "loss":
            return percentage((1 - value) * 100)
        case "gain":
            return percentage((value - 1) * 100)
        case "inverse":
            return percentage((1 / value - 1) * 100)
    return number(value * float(how.get("times", 1)))


def _measured(name: str, metric: str, where: Mapping[str, Any]) -> float:
    value = figure(_result(name), metric, **where)
    if value is None:
        raise ValueError(f"bench/results/{name}.json has no {metric} where {where}")
    return value


def _speed_table() -> str:
    plan = _result("in_flight")["plan"]
    links = [in_flight.link_name(round_trip) for round_trip in plan["round_trips_ms"]]
    lines = ["| in flight | " + " | ".join(f"MB/s, {link}" for link in links) + " |"]
    lines.append("| ---: |" + " ---: |" * len(links))
    for depth in plan["in_flight"]:
        where = [{"in_flight": depth, "round_trip": link} for link in links]
        cells = [number(_measured("in_flight", "mb_per_s", place)) for place in where]
        lines.append(f"| {depth} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _memory_table() -> str:
    counts = range(1, _result("in_flight")["plan"]["remembered"] + 1)
    lines = ["| remembered batches | bytes per producer id |", "| ---: | ---: |"]
    for count in counts:
        cell = number(_measured("in_flight", "bytes_per_id", {"remembered": count}))
        lines.append(f"| {count} | {cell} |")
    return "\n".join(lines)


def _sizing_table() -> str:
    lines = ["| producer ids on a partition | MB | bytes per id |", "| ---: | ---: | ---: |"]
    for ids in _result("producer_ids")["plan"]["ids"]:
        used_mb = _measured("producer_ids", "table_mb", {"ids": ids})
        lines.append(f"| {ids:,} | {number(used_mb)} | {number(used_mb * 1e6 / ids)} |")
    return "\n".join(lines)


def main() -> None:
    """Write the pages."""
    PAGE_FILE.write_text(render())
    for path, text in render_guides().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
