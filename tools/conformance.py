"""Run `oncelog conform` on several brokers, and write docs/conformance.md from the stored results.

    python tools/conformance.py                    write the page from bench/conformance/*.json
    python tools/conformance.py --run              run on all brokers of BROKERS first
    python tools/conformance.py --run kfake        run on one of them first

Each broker runs with its default settings. A broker that cannot run here is named on the page, with the
reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from oncelog_devtools import kfake
from oncelog_devtools.apache_kafka import ApacheKafka

import oncelog
from oncelog.cli.conform import joined_rows, section_counts
from oncelog.conform.suite import RESULTS, Outcome
from oncelog.testing.broker_process import BrokerProcess

ROOT = Path(__file__).parents[1]
RESULTS_FOLDER = ROOT / "bench" / "conformance"
PAGE = ROOT / "docs" / "conformance.md"
BEGIN, END = "<!-- begin results -->", "<!-- end results -->"
EXIT_CODES = (0, 3)
MAX_TIME_S, RUN_LIMIT_S = 1_500, 1_800
_WORDS = {"differs": "differ", "fail": "fail", "skipped": "skipped"}

Started = contextlib.AbstractContextManager[tuple[str, str]]


class BrokerUnderTest(NamedTuple):
    """A broker to check: one column of the page.

    `start` runs the broker for a `with` block, which gets the broker's address and version.
    """

    key: str
    title: str
    start: Callable[[], Started]
    timeout_s: int = 20
    """Seconds that one scenario may take. They exceed the interval at which the broker looks for timed-out
    transactions.
    """


@contextlib.contextmanager
def _oncelog() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as directory, BrokerProcess(Path(directory) / "data") as broker:
        yield broker.bootstrap_servers, oncelog.__version__


@contextlib.contextmanager
def _kafka(version: str) -> Iterator[tuple[str, str]]:
    with ApacheKafka(version=version) as kafka:
        yield kafka.bootstrap_servers, version


@contextlib.contextmanager
def _kfake() -> Iterator[tuple[str, str]]:
    with kfake.Kfake() as broker:
        yield broker.bootstrap_servers, kfake.version()


BROKERS = (
    BrokerUnderTest("oncelog", "Oncelog", _oncelog),
    BrokerUnderTest("kafka-4.3", "Apache Kafka", lambda: _kafka("4.3.0")),
    BrokerUnderTest("kafka-4.0", "Apache Kafka", lambda: _kafka("4.0.0")),
    BrokerUnderTest("kafka-3.9", "Apache Kafka", lambda: _kafka("3.9.2")),
    BrokerUnderTest("kfake", "kfake", _kfake, timeout_s=5),
)


def measure(broker: BrokerUnderTest) -> dict[str, Any]:
    """Start the broker, run all scenarios on it, and return the results for the page."""
    result: dict[str, Any] = {"title": broker.title, "date": datetime.now(UTC).date().isoformat()}
    try:
        with broker.start() as (address, version):
            outcomes = _run(address, broker.timeout_s)
    except Exception as error:
        return result | {"missing": f"{type(error).__name__}: {error}"}
    others = [outcome for outcome in outcomes if outcome.result != "pass"]
    return result | {
        "version": version,
        "oncelog": oncelog.__version__,
        "counts": section_counts(outcomes),
        "not_passed": joined_rows(others),
    }


def _run(address: str, timeout_s: int) -> list[Outcome]:
    command = [sys.executable, "-m", "oncelog.cli.main", "conform", "-b", address, "-o", "json"]
    command += ["--timeout", str(timeout_s), "--max-time", str(MAX_TIME_S)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=RUN_LIMIT_S)
    if ended.returncode not in EXIT_CODES:
        raise RuntimeError(f"oncelog conform ended with exit code {ended.returncode}")
    return [Outcome(**row) for row in json.loads(ended.stdout)]


def stored() -> list[dict[str, Any]]:
    """Return the stored results, in the order of BROKERS."""
    files = [RESULTS_FOLDER / f"{broker.key}.json" for broker in BROKERS]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def render(results: Sequence[dict[str, Any]]) -> str:
    """Return the generated part of the page, which stands between two HTML comments."""
    had = [result for result in results if "missing" not in result]
    sections = list(dict.fromkeys(row["section"] for result in had for row in result["counts"]))
    names = [_name(result) for result in had]
    lines = [f"| section | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
    lines.append(f"| *checked on* | {' | '.join(result['date'] for result in had)} |")
    for section in sections:
        cells = [_cell(result["counts"], section) for result in had]
        title = section if section == "all" else f"`{section}`"
        lines.append(f"| {title} | {' | '.join(cells)} |")
    for result in results:
        if "missing" in result:
            lines += ["", f"{result['title']} could not be checked on {result['date']}: {result['missing']}"]
    for result in had:
        lines += ["", *_others(result)]
    return "\n".join(lines)


def _name(result: dict[str, Any]) -> str:
    return f"{result['title']} {result['version']}"


def _cell(counts: Sequence[dict[str, Any]], section: str) -> str:
    row = next((row for row in counts if row["section"] == section), None)
    if row is None:
        return "-"
    others = [f"{row[kind]} {_WORDS[kind]}" for kind in RESULTS[1:] if row[kind]]
    return ", ".join([f"{row['pass']} pass", *others])


def _others(result: dict[str, Any]) -> Iterator[str]:
    """Yield lines of text about the scenarios that did not pass on one broker."""
    yield f"### {_name(result)}"
    yield ""
    if not result["not_passed"]:
        yield "Everything passed."
        return
    yield "| section | scenario | version | result | reason |"
    yield "| --- | --- | --- | --- | --- |"
    for row in result["not_passed"]:
        if row["result"] != "skipped":
            cells = [row["section"], row["scenario"], row["version"] or "", row["result"], _reason(row)]
            yield f"| {' | '.join(cells)} |"
    skipped: dict[tuple[str, str], int] = {}
    for row in result["not_passed"]:
        if row["result"] == "skipped":
            key = row["section"], row["reason"]
            skipped[key] = skipped.get(key, 0) + 1
    for (section, reason), count in skipped.items():
        yield f"| {section} | {count} scenarios, in some or all versions | | skipped | {reason} |"


def _reason(row: dict[str, Any]) -> str:
    if row["result"] == "differs":
        return f"[{row['reason']}](differences.md#{row['reason']})"
    step = f"`{_plain(row['step'])}`: " if row["step"] else ""
    return f"{step}{_plain(row['reason'])}"


def _plain(text: str) -> str:
    shown = re.sub(r"conform-[0-9a-f]{8}-\d+", "conform-...", text).replace("|", "\\|").replace("\n", " ")
    return shown if len(shown) <= 160 else f"{shown[:160]}..."


def page(text: str, results: Sequence[dict[str, Any]]) -> str:
    """Return the text of the page with its generated part replaced."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{render(results)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--run", nargs="*", choices=[broker.key for broker in BROKERS], metavar="BROKER")
    chosen = parser.parse_args().run
    for broker in BROKERS:
        if chosen is not None and (not chosen or broker.key in chosen):
            print(f"running on {broker.key}", file=sys.stderr)
            RESULTS_FOLDER.mkdir(exist_ok=True)
            text = json.dumps(measure(broker), indent=1, ensure_ascii=False)
            (RESULTS_FOLDER / f"{broker.key}.json").write_text(text + "\n")
    PAGE.write_text(page(PAGE.read_text(), stored()))


if __name__ == "__main__":
    main()
