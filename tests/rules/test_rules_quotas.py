"""Tests of quotas by tables/quotas.txt and tables/quota_waits.txt, and of rates by random requests."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncelog.errors import InvalidRequest, UnsupportedVersion
from oncelog.rules.limits.quotas import (
    DEFAULT,
    EMPTY,
    EffectiveQuota,
    QuotaEntity,
    QuotaFilter,
    QuotaPrincipal,
    apply_changes,
    charge,
    decide_wait_ms,
    find_effective_quota,
    normalize_entity,
    parse_entity,
)

TABLES = Path(__file__).parents[1] / "tables"
ALICE = QuotaEntity(user="alice")


def rows(name: str) -> list[list[str]]:
    lines = [line for line in (TABLES / name).read_text().splitlines() if line and not line.startswith("#")]
    return [[cell.strip() for cell in line.split("|")] for line in lines]


def parts(text: str) -> list[str]:
    return [] if text == "-" else [part.strip() for part in text.split(",")]


def entity_of(text: str) -> QuotaEntity:
    user, client_id = ({"-": None, "*": DEFAULT}.get(name, name) for name in text.split("/"))
    return QuotaEntity(user, client_id)


@pytest.mark.parametrize("row", rows("quotas.txt"), ids=" ".join)
def test_the_first_entity_with_a_rate_decides(row: list[str]) -> None:
    rates = {entity_of(entity_text): float(rate) for rate, entity_text in map(str.split, parts(row[0]))}
    user, client_id, rate, shared_by = ("" if cell == "-" else cell for cell in row[1:])
    found = find_effective_quota(rates, QuotaPrincipal(user, client_id))
    if not rate:
        assert found is None
    else:
        names = ("" if name == "-" else name for name in shared_by.split("/"))
        assert found == EffectiveQuota(float(rate), QuotaPrincipal(*names))


@pytest.mark.parametrize("row", rows("quota_waits.txt"), ids=" ".join)
def test_throttle_times_follow_the_table(row: list[str]) -> None:
    _, key, rate, used, at, wait = row
    bucket = EMPTY
    for second, amount in (part.split(": ") for part in parts(used)):
        bucket = charge(bucket, float(amount), float(rate), int(second) * 1000)
    assert decide_wait_ms(bucket, key, float(rate), 10, int(float(at) * 1000)) == int(wait)


def test_ips_have_buckets_of_their_own() -> None:
    rates = {QuotaEntity(ip="10.0.0.1"): 1.0, QuotaEntity(ip=DEFAULT): 2.0, QuotaEntity(DEFAULT): 3.0}
    assert find_effective_quota(rates, QuotaPrincipal(ip="10.0.0.1")) == EffectiveQuota(
        1.0, QuotaPrincipal(ip="10.0.0.1")
    )
    assert find_effective_quota(rates, QuotaPrincipal(ip="10.0.0.2")) == EffectiveQuota(
        2.0, QuotaPrincipal(ip="10.0.0.2")
    )


@given(
    st.floats(1, 1e9),
    st.lists(st.tuples(st.floats(0, 1e5), st.integers(0, 100_000)), max_size=30),
)
def test_a_client_that_waits_for_its_throttle_time_keeps_the_rate(
    rate: float, wanted: list[tuple[float, int]]
) -> None:
    """A client that waits can use at most the burst, plus its rate multiplied by the time, plus its last
    request.
    """
    bucket, now_ms, used = EMPTY, 0, 0.0
    for amount, pause_ms in wanted:
        now_ms += pause_ms + decide_wait_ms(bucket, "producer_byte_rate", rate, 10, now_ms)
        assert used <= rate * (10 + now_ms / 1000) * (1 + 1e-6) + 1e-6
        bucket, used = charge(bucket, amount, rate, now_ms), used + amount


def test_entities_are_parsed_from_the_protocols_names() -> None:
    assert parse_entity([("user", "alice"), ("client-id", None)]) == QuotaEntity("alice", DEFAULT)
    assert parse_entity([("ip", None)]) == QuotaEntity(ip=DEFAULT)
    assert normalize_entity(QuotaEntity(ip="0:0:0:0:0:0:0:1")) == QuotaEntity(ip="::1")
    assert str(QuotaEntity("alice", DEFAULT)) == "user alice, client-id <default>"


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([], "needs a user"),
        ([("group", "g")], "'group'"),
        ([("user", "")], "use null for the default"),
        ([("ip", "1.2.3.4"), ("user", "alice")], "cannot be combined"),
        ([("ip", "example.org")], "not an IP address"),
    ],
)
def test_invalid_entities_are_rejected(pairs: list[tuple[str, str | None]], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        normalize_entity(parse_entity(pairs))


def test_changes_replace_and_remove_rates() -> None:
    values = {"producer_byte_rate": 10.0}
    assert apply_changes(ALICE, values, [("consumer_byte_rate", 5.0), ("producer_byte_rate", None)]) == {
        "consumer_byte_rate": 5.0
    }
    assert apply_changes(ALICE, values, [("request_percentage", None)]) == values
    assert values == {"producer_byte_rate": 10.0}


@pytest.mark.parametrize(
    ("entity", "changes", "said"),
    [
        (ALICE, [("connection_creation_rate", 1.0)], "not a quota of user alice"),
        (QuotaEntity(ip="::1"), [("producer_byte_rate", 1.0)], "not a quota of ip ::1"),
        (ALICE, [("producer_byte_rate", 0.0)], "above 0"),
        (ALICE, [("producer_byte_rate", math.nan)], "above 0"),
        (ALICE, [("producer_byte_rate", math.inf)], "above 0"),
        (ALICE, [("producer_byte_rate", 1e19)], "is above"),
        (ALICE, [("producer_byte_rate", 1.5)], "whole number"),
        (ALICE, [("producer_byte_rate", 1.0), ("producer_byte_rate", None)], "occurs twice"),
    ],
)
def test_invalid_quotas_are_rejected(
    entity: QuotaEntity, changes: list[tuple[str, float | None]], said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said):
        apply_changes(entity, {}, changes)


def test_filters_select_the_entities_that_match() -> None:
    both = QuotaEntity("alice", DEFAULT)
    assert QuotaFilter().matches(both)
    assert QuotaFilter({"user": "alice"}).matches(both)
    assert QuotaFilter({"user": None, "client-id": DEFAULT}, is_strict=True).matches(both)
    assert not QuotaFilter({"user": "alice"}, is_strict=True).matches(both)
    assert not QuotaFilter({"client-id": "app"}).matches(both)
    assert not QuotaFilter({"ip": None}).matches(both)
    with pytest.raises(UnsupportedVersion, match="'group'"):
        QuotaFilter({"group": "g"}).check()
    with pytest.raises(InvalidRequest, match="cannot be combined"):
        QuotaFilter({"ip": None, "user": None}).check()


@pytest.mark.parametrize(
    ("entity", "key", "most"),
    [
        (ALICE, "producer_byte_rate", 2**63 - 1),
        (ALICE, "consumer_byte_rate", 2**63 - 1),
        (QuotaEntity(ip="::1"), "connection_creation_rate", 2**31 - 1),
    ],
)
def test_quotas_in_bytes_and_connections_are_whole_numbers_up_to_a_limit(
    entity: QuotaEntity, key: str, most: int
) -> None:
    assert apply_changes(entity, {}, [(key, most)]) == {key: most}
    with pytest.raises(InvalidRequest, match="is above"):
        apply_changes(entity, {}, [(key, most + 1)])
    with pytest.raises(InvalidRequest, match="whole number"):
        apply_changes(entity, {}, [(key, 1.5)])


@pytest.mark.parametrize("key", ["request_percentage", "controller_mutation_rate", "producer_ids_rate"])
def test_other_quotas_may_be_fractions_of_any_size(key: str) -> None:
    assert apply_changes(ALICE, {}, [(key, 0.5)]) == {key: 0.5}
    assert apply_changes(ALICE, {}, [(key, 1e30)]) == {key: 1e30}


def test_all_changes_of_one_request_are_made() -> None:
    changes = [("producer_byte_rate", None), ("consumer_byte_rate", None), ("request_percentage", 5.0)]
    assert apply_changes(ALICE, {"consumer_byte_rate": 1.0}, changes) == {"request_percentage": 5.0}


def test_entities_that_can_have_quotas_stay_as_they_are() -> None:
    assert normalize_entity(QuotaEntity("alice", "app")) == QuotaEntity("alice", "app")
    assert normalize_entity(QuotaEntity(ip=DEFAULT)) == QuotaEntity(ip=DEFAULT)


@pytest.mark.parametrize("kinds", [["ip"], ["user"], ["client-id"], ["user", "client-id"], []])
def test_valid_filters_are_accepted(kinds: list[str]) -> None:
    QuotaFilter(dict.fromkeys(kinds)).check()
