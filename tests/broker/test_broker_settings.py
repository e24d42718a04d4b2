"""Settings that clients change while the broker runs, and how their text is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers_broker import RawClient
from hypothesis import given
from hypothesis import strategies as st

from oncelog import Broker
from oncelog.broker.topics import FILE_NAME
from oncelog.config import TOPIC
from oncelog.errors import ConfigError, InvalidConfig
from oncelog.wire.messages import IncrementalAlterConfigsRequest as Alter

SET, DELETE = 0, 1


def alter(client: RawClient, resource_type: int, name: str, **values: str | None) -> int:
    """Set values (`a__b` is a.b), or delete those that are None; the error code."""
    configs = [
        Alter.AlterableConfig(
            name=key.replace("_", "."), config_operation=DELETE if value is None else SET, value=value
        )
        for key, value in values.items()
    ]
    resource = Alter.AlterConfigsResource(resource_type=resource_type, resource_name=name, configs=configs)
    (answer,) = client.ask(Alter(resources=[resource]), 1).responses
    return int(answer.error_code)


@given(st.text(alphabet="0123456789+-_. eExn\t", max_size=25))
def test_a_number_is_read_as_java_reads_it_or_refused(text: str) -> None:
    try:
        settings = TOPIC.parse({"retention.bytes": text, "min.cleanable.dirty.ratio": "0.5"})
    except ConfigError:
        return
    assert -(2**63) <= settings["retention.bytes"] < 2**63
    assert settings["retention.bytes"] == int(text)
    assert "_" not in text


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1_0", "", "x"])
def test_a_ratio_is_a_finite_number(text: str) -> None:
    with pytest.raises(ConfigError):
        TOPIC.parse({"min.cleanable.dirty.ratio": text})


def test_a_small_segment_size_of_an_older_version_still_opens(tmp_path: Path) -> None:
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        client.create_topic("t")
        assert alter(client, 2, "t", segment_bytes="1000") == InvalidConfig.code
    path = tmp_path / FILE_NAME
    content = json.loads(path.read_text())
    content["topics"][0]["settings"] = {"segment.bytes": "1000"}
    path.write_text(json.dumps(content))
    with Broker(tmp_path) as broker, RawClient(broker.bootstrap_servers) as client:
        assert alter(client, 2, "t", retention_ms="5") == 0
        assert alter(client, 2, "t", segment_bytes="999") == InvalidConfig.code
        assert alter(client, 2, "t", segment_bytes="2000000") == 0
        assert alter(client, 2, "t", segment_bytes="1000") == InvalidConfig.code
