"""docs/differences.md names exactly the APIs and versions that Apache Kafka offers and we do not."""

from __future__ import annotations

import re
from pathlib import Path

from oncelog_devtools.apache_kafka import ApacheKafka
from support.broker import RawClient

from oncelog.broker.state import OFFERED
from oncelog.wire.messages import ApiVersionsRequest

DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"
_ROW = re.compile(r"^\| \w+ \| (\d+) \| (\d+)(?:-(\d+))? \|", re.MULTILINE)


def test_every_api_and_version_that_is_not_offered_is_named(apache_kafka: ApacheKafka) -> None:
    with RawClient(apache_kafka.bootstrap_servers) as client:
        request = ApiVersionsRequest(client_software_name="test", client_software_version="1")
        answer = client.ask(request, 4)
    theirs = {
        (row.api_key, v) for row in answer.api_keys for v in range(row.min_version, row.max_version + 1)
    }
    ours = {(key, v) for key, api in OFFERED.items() for v in range(api.min_version, api.max_version + 1)}
    named = {
        (int(key), version)
        for key, first, last in _ROW.findall(DIFFERENCES.read_text())
        for version in range(int(first), int(last or first) + 1)
    }
    assert theirs - ours == named
    assert ours <= theirs
