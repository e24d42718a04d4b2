"""Idempotence and the settings that contradict it: ConfigError before any connection, or a warning."""

from __future__ import annotations

import socket
import warnings
from typing import Any

import pytest

import oncelog
from oncelog.client.producer.options import resolve
from oncelog.config import PRODUCER
from oncelog.errors import ConfigError
from oncelog.rules.idempotence.error_policy import Mode

IN_FLIGHT = "max.in.flight.requests.per.connection"
CONFLICTS = [("acks", "0"), ("acks", "1"), ("retries", 0), (IN_FLIGHT, 6)]


def options(**config: Any) -> Any:
    return resolve(PRODUCER.parse({key.replace("_", "."): value for key, value in config.items()}))


@pytest.mark.behaviour("I2", "I3")
def test_idempotence_is_on_by_default_and_implies_the_rest() -> None:
    resolved = options()
    assert resolved.is_idempotent
    assert (resolved.acks, resolved.retries, resolved.max_in_flight) == (-1, 2_147_483_647, 5)
    assert resolved.report(None, None).reason == "on by default"


@pytest.mark.behaviour("I3")
@pytest.mark.parametrize(("key", "value"), CONFLICTS)
def test_a_conflict_with_requested_idempotence_names_both_settings_before_any_connection(
    key: str, value: object
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ConfigError) as caught:
            oncelog.Producer({"bootstrap.servers": address, "enable.idempotence": "true", key: value})
        with pytest.raises(BlockingIOError):
            listener.accept()  # the constructor raised, so no thread is left that could connect later
    assert "enable.idempotence=true" in str(caught.value)
    assert f"{key}={value}" in str(caught.value)


@pytest.mark.behaviour("I3")
@pytest.mark.parametrize(("key", "value"), CONFLICTS)
def test_a_conflict_with_default_idempotence_switches_it_off_with_a_warning(key: str, value: object) -> None:
    with oncelog.Broker() as broker:
        config = {"bootstrap.servers": broker.bootstrap_servers, key: value}
        with (
            pytest.warns(UserWarning, match="idempotence is switched off") as caught,
            oncelog.Producer(config) as producer,
        ):
            report = producer.idempotence()
    assert [warning.filename for warning in caught] == [__file__]
    assert not report.enabled
    assert f"{key}={value}" in report.reason


@pytest.mark.behaviour("I3")
def test_idempotence_that_the_user_switches_off_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolved = options(enable_idempotence="false", acks="1", retries=0)
    assert not resolved.is_idempotent
    assert resolved.acks == 1


def test_a_short_delivery_timeout_is_an_error_if_set_and_extended_if_defaulted() -> None:
    with pytest.raises(ConfigError, match=r"delivery\.timeout\.ms=100 is less than linger\.ms"):
        options(delivery_timeout_ms=100)
    assert options(request_timeout_ms=200_000).delivery_timeout_ms == 200_005


@pytest.mark.behaviour("T1")
def test_a_transactional_id_implies_idempotence() -> None:
    resolved = options(transactional_id="tx", transaction_timeout_ms=5_000)
    assert resolved.mode is Mode.TRANSACTIONAL
    assert resolved.is_idempotent
    assert (resolved.transactional_id, resolved.transaction_timeout_ms) == ("tx", 5_000)
    assert resolved.report(None, None).reason == "implied by transactional.id"


@pytest.mark.behaviour("T1")
@pytest.mark.parametrize(
    ("conflict", "named"),
    [
        ({"enable_idempotence": False}, "enable.idempotence=false"),
        ({"acks": "1"}, "acks=1"),
        ({"retries": 0}, "retries=0"),
        ({"max_in_flight_requests_per_connection": 6}, "max.in.flight.requests.per.connection=6"),
    ],
)
def test_settings_that_contradict_a_transactional_id_are_refused(
    conflict: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        options(transactional_id="tx", **conflict)
    assert "transactional.id='tx'" in str(raised.value)


def test_an_empty_transactional_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="set it to a name"):
        options(transactional_id="")


def test_an_unknown_setting_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean linger\.ms"):
        PRODUCER.parse({"linger.msec": 5})
