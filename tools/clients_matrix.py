"""Check what Kafka clients do on the wire, and write the matrix of docs/conformance.md.

    python tools/clients_matrix.py                          write the page from bench/clients/*.json
    python tools/clients_matrix.py --run                    run all clients on our broker first
    python tools/clients_matrix.py --run librdkafka java    run some of them first
    python tools/clients_matrix.py --run --kafka            run on Apache Kafka; store what the page compares
    python tools/clients_matrix.py --run -b HOST:PORT       run on another broker; print, and store nothing

Each client runs a small program of tools/client_matrix behind the fault proxy. A client whose program cannot
be built here is left out, and its stored result stays; the reason is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oncelog_devtools.apache_kafka import VERSION, ApacheKafka, MissingDependency
from oncelog_devtools.client_matrix.clients import CLIENTS
from oncelog_devtools.client_matrix.judgements import ROWS
from oncelog_devtools.client_matrix.matrix import measure, render

import oncelog
from oncelog.testing.broker_process import BrokerProcess

ROOT = Path(__file__).parents[1]
RESULTS_FOLDER = ROOT / "bench" / "clients"
KAFKA_FOLDER = RESULTS_FOLDER / "apache-kafka"
PROGRAMS = ROOT / "tools" / "client_matrix"
PAGE = ROOT / "docs" / "conformance.md"
BEGIN, END = "<!-- begin clients -->", "<!-- end clients -->"


@contextlib.contextmanager
def broker_under_clients(bootstrap_servers: str | None, is_kafka: bool) -> Iterator[tuple[str, str]]:
    """Yield the address and the name of the broker to use; without an address, start one."""
    if bootstrap_servers:
        yield bootstrap_servers, f"the broker at {bootstrap_servers}"
    elif is_kafka:
        with ApacheKafka() as kafka:
            yield kafka.bootstrap_servers, f"Apache Kafka {VERSION}"
    else:
        with tempfile.TemporaryDirectory() as directory, BrokerProcess(Path(directory) / "data") as broker:
            yield broker.bootstrap_servers, f"Oncelog {oncelog.__version__}"


def run(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the key and the result of each client that could be run."""
    keys = arguments.run
    rows = [row for row in ROWS if not arguments.row or row.key in arguments.row]
    with broker_under_clients(arguments.bootstrap_server, arguments.kafka) as (address, name):
        for client in CLIENTS:
            if keys and client.key not in keys:
                continue
            print(f"running {client.title}", file=sys.stderr)
            try:
                yield client.key, measure(client, PROGRAMS, address, name, rows)
            except MissingDependency as reason:
                print(f"{client.title} is left out: {reason}", file=sys.stderr)


def stored(folder: Path = RESULTS_FOLDER) -> list[dict[str, Any]]:
    """Return the stored results, in the order of CLIENTS."""
    files = [folder / f"{client.key}.json" for client in CLIENTS]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def page(text: str) -> str:
    """Return the text of the page with its generated part replaced, from the stored results."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{render(stored(), stored(KAFKA_FOLDER))}\n{END}{rest.partition(END)[2]}"


def parsed_arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    keys, row_keys = [client.key for client in CLIENTS], [row.key for row in ROWS]
    parser.add_argument("--run", nargs="*", choices=keys, metavar="CLIENT")
    parser.add_argument("--row", action="append", default=[], choices=row_keys, help="print only this row")
    parser.add_argument("-b", "--bootstrap-server", metavar="HOST:PORT")
    parser.add_argument("--kafka", action="store_true", help=f"start Apache Kafka {VERSION}")
    arguments = parser.parse_args()
    if arguments.run is None and (arguments.row or arguments.bootstrap_server or arguments.kafka):
        parser.error("--row, --kafka and -b need --run")
    return arguments


def main() -> None:
    arguments = parsed_arguments()
    is_stored = not arguments.row and arguments.bootstrap_server is None
    folder = KAFKA_FOLDER if arguments.kafka else RESULTS_FOLDER
    try:
        for key, result in run(arguments) if arguments.run is not None else ():
            text = json.dumps(result, indent=1, ensure_ascii=False)
            if is_stored:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{key}.json").write_text(text + "\n")
            else:
                print(text)
    except MissingDependency as reason:  # of the broker
        sys.exit(f"nothing was run: {reason}")
    if is_stored:
        PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
