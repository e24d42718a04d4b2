"""The client quotas of this broker, and their current usage.

`rules.limits.quotas` decides how long clients are throttled. All quotas are stored in one file, which every
change replaces durably. While no quota except connection_creation_rate is set, `is_any` is False, and the
server does not count the usage of requests. Source: KIP-13, KIP-124, KIP-599; Kafka's ClientQuotaManager.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from oncelog.broker.request import Request
from oncelog.broker.state_file import ChangeLock, EncodedRows, PreparedRows, read_state, write_state
from oncelog.broker.stepwise import Work, run_work
from oncelog.errors import BrokerError, ThrottlingQuotaExceeded, without_traceback
from oncelog.limits import DEFAULT_LIMITS
from oncelog.log.disk import Disk
from oncelog.rules.limits.quotas import (
    CONNECTIONS,
    CONSUMER_BYTES,
    EMPTY,
    MUTATIONS,
    PRODUCER_BYTES,
    PRODUCER_IDS,
    REQUEST_PERCENTAGE,
    Bucket,
    EffectiveQuota,
    QuotaEntity,
    QuotaPrincipal,
    Values,
    apply_changes,
    charge,
    decide_wait_ms,
    drain,
    find_effective_quota,
    normalize_entity,
    parse_entity,
)
from oncelog.settings import Settings
from oncelog.wire.messages import FetchResponse

FILE_NAME = "oncelog-quotas.json"

CHANGES_PER_STEP = 250
"""Changes of entities that one step validates."""
_PRODUCE, _FETCH, _INIT_PRODUCER_ID = 0, 1, 22
_CREATE_TOPICS, _DELETE_TOPICS, _CREATE_PARTITIONS = 19, 20, 37
_OTHERS = (REQUEST_PERCENTAGE,)
_QUOTAS_OF_API = {
    _PRODUCE: (PRODUCER_BYTES, REQUEST_PERCENTAGE),
    _FETCH: (CONSUMER_BYTES, REQUEST_PERCENTAGE),
    _INIT_PRODUCER_ID: (PRODUCER_IDS, REQUEST_PERCENTAGE),
    _CREATE_TOPICS: (MUTATIONS, REQUEST_PERCENTAGE),
    _DELETE_TOPICS: (MUTATIONS, REQUEST_PERCENTAGE),
    _CREATE_PARTITIONS: (MUTATIONS, REQUEST_PERCENTAGE),
}
"""The quotas that may throttle the responses of an API."""


QuotaChange = tuple[QuotaEntity, Collection[tuple[str, float | None]]]
"""(entity, changes). Each change is (quota name, new rate); rate None removes the quota."""


class QuotaManager:
    """The quotas, and one bucket of usage for each group of clients that share a quota.

    Rates are in units per second, such as bytes. If the rate of a quota changes, its new bucket starts
    without usage. A bucket does not belong to a connection, so a throttled client stays throttled after
    reconnecting. `throttled` counts throttled responses by quota, for the metrics.
    """

    def __init__(
        self,
        disk: Disk,
        settings: Settings,
        throttled: dict[str, int],
        max_shares: int = DEFAULT_LIMITS.max_quota_shares,
    ) -> None:
        # Above this number of buckets, those whose usage has drained completely are removed. Clients choose
        # their client ids, so the number of buckets would otherwise be unbounded.
        self._max_shares = max_shares
        self._disk, self._throttled = disk, throttled
        self._burst_seconds: int = settings["quota.window.num"] * settings["quota.window.size.seconds"]
        self._buckets: dict[tuple[str, EffectiveQuota], Bucket] = {}
        """The usage bucket of each (quota name, effective quota). See
        test_a_client_over_its_fetch_quota_is_throttled_on_a_new_connection_too.
        """
        self._swept_at = max_shares
        self.values: Mapping[QuotaEntity, Values] = {}
        self._rows, self._lock = EncodedRows(_row), ChangeLock()
        self._rates: dict[str, dict[QuotaEntity, float]] = {}
        self._shares: dict[tuple[str, QuotaPrincipal], EffectiveQuota | None] = {}
        self.is_any = False
        # An unreadable file prevents the start, because without quotas clients could overload the broker.
        stored = read_state(disk, FILE_NAME, _parse)
        if stored is not None:
            self._set_values(stored, stored)

    def alter(
        self, entity: QuotaEntity, changes: Collection[tuple[str, float | None]], *, is_test: bool
    ) -> None:
        """Change quotas of an entity durably; rate None removes a quota. `is_test`: only validate.

        Raises InvalidRequest for an invalid change. Raises StorageError if the file cannot be written; then
        nothing changes.
        """
        (error,) = self.alter_all([(entity, changes)], is_test=is_test)
        if error is not None:
            raise error

    def prepare(
        self, entity: QuotaEntity, changes: Collection[tuple[str, float | None]]
    ) -> PreparedRows[QuotaEntity, Values]:
        """Encode an entity's row as it will be after a change, so that `alter_in_steps` need not."""
        with suppress(BrokerError):
            values = apply_changes(entity, self.values.get(entity, {}), changes)
            return self._rows.prepare({entity: values} if values else {})
        return {}

    def alter_all(self, changes: Iterable[QuotaChange], *, is_test: bool) -> list[BrokerError | None]:
        """Run `alter_in_steps` to its end in one step."""
        return run_work(self.alter_in_steps(changes, is_test=is_test))

    def alter_in_steps(
        self,
        changes: Iterable[QuotaChange],
        *,
        is_test: bool,
        prepared: PreparedRows[QuotaEntity, Values] = MappingProxyType({}),
    ) -> Work[list[BrokerError | None]]:
        """Change quotas of several entities with one write, in another thread. Return the error of each
        entity, or None.

        `prepared` are the results of `prepare`. The caller must run all steps. Raises StorageError if the
        file cannot be written; then nothing changes.
        """
        return self._lock.hold(self._alter(changes, is_test=is_test, prepared=prepared))

    def _alter(
        self, changes: Iterable[QuotaChange], *, is_test: bool, prepared: PreparedRows[QuotaEntity, Values]
    ) -> Work[list[BrokerError | None]]:
        result, errors = dict(self.values), []
        changed: dict[QuotaEntity, None] = {}
        for count, (entity, rates) in enumerate(changes, 1):
            error = None
            try:
                values = apply_changes(entity, result.get(entity, {}), rates)
            except BrokerError as refusal:
                error = without_traceback(refusal)
            else:
                changed[entity] = None
                result[entity] = values
                if not values:
                    del result[entity]
            errors.append(error)
            if count % CHANGES_PER_STEP == 0:
                yield None
        if not is_test and result != self.values:
            rows = yield from self._rows.of(result, prepared)
            yield partial(write_state, self._disk, FILE_NAME, {"quotas": rows})
            self._set_values(result, changed)
        return errors

    def _set_values(self, values: Mapping[QuotaEntity, Values], changed: Iterable[QuotaEntity]) -> None:
        before, self.values = self.values, values
        for entity in changed:
            for key in before.get(entity, ()):
                rates = self._rates[key]
                del rates[entity]
                if not rates:
                    del self._rates[key]
            for key, rate in values.get(entity, {}).items():
                self._rates.setdefault(key, {})[entity] = rate
        self._shares = {}
        self.is_any = bool(self._rates.keys() - {CONNECTIONS})

    # Usage

    def charge(self, key: str, principal: QuotaPrincipal | None, amount: float, now_ms: int) -> None:
        """Count usage of a quota, even above its rate. `amount` is in the unit of the quota."""
        share = self._share(key, principal)
        if share is not None:
            bucket_key = key, share
            bucket = self._buckets.get(bucket_key, EMPTY)
            self._buckets[bucket_key] = charge(bucket, amount, share.rate, now_ms)
            if len(self._buckets) > self._swept_at:
                self._sweep(now_ms)

    def wait_ms(self, key: str, principal: QuotaPrincipal | None, now_ms: int) -> int:
        """Return the time in ms for which the client must be throttled; 0 if its usage is within the
        quota.
        """
        share = self._share(key, principal)
        if share is None:
            return 0
        bucket = self._buckets.get((key, share), EMPTY)
        return decide_wait_ms(bucket, key, share.rate, self._burst_seconds, now_ms)

    def charge_or_refuse(
        self, key: str, principal: QuotaPrincipal | None, amount: float, now_ms: int
    ) -> None:
        """Count usage of a quota. If the quota is exceeded already, count nothing and raise
        ThrottlingQuotaExceeded.
        """
        wait_ms = self.wait_ms(key, principal, now_ms)
        if wait_ms:
            raise ThrottlingQuotaExceeded(f"{key} is exceeded; try again in {wait_ms} ms")
        self.charge(key, principal, amount, now_ms)

    def mutate(self, request: Request, partition_count: int, first_strict_version: int, now_ms: int) -> None:
        """Count partitions that are about to be created or deleted.

        Raises ThrottlingQuotaExceeded if the quota is exceeded and the request's version is at least
        `first_strict_version`. Clients with lower versions do not know this error (KIP-599).
        """
        if request.header.api_version >= first_strict_version:
            self.charge_or_refuse(MUTATIONS, request.quota_principal, partition_count, now_ms)
        else:
            self.charge(MUTATIONS, request.quota_principal, partition_count, now_ms)

    def max_fetch_bytes(self, principal: QuotaPrincipal | None) -> float:
        """Return the maximum bytes of a fetch response under the client's quota; infinity without a quota."""
        share = self._share(CONSUMER_BYTES, principal)
        return float("inf") if share is None else max(share.rate * self._burst_seconds, 1)

    def _share(self, key: str, principal: QuotaPrincipal | None) -> EffectiveQuota | None:
        if principal is None or key not in self._rates:
            return None
        share_key = key, principal
        if share_key in self._shares:
            return self._shares[share_key]
        if len(self._shares) >= self._max_shares:
            self._shares.clear()
        share = self._shares[share_key] = find_effective_quota(self._rates[key], principal)
        return share

    def _sweep(self, now_ms: int) -> None:
        """Remove buckets without usage. The next call is due when the number of buckets has doubled."""
        self._buckets = {
            (key, share): bucket
            for (key, share), bucket in self._buckets.items()
            if drain(bucket, share.rate, now_ms).amount
        }
        self._swept_at = max(2 * len(self._buckets), self._max_shares)

    # Connections and their requests

    def admit_connection(self, ip: str, now_ms: int) -> int:
        """Count a new connection and return 0.

        If too many connections were opened from address `ip`, count nothing, and return the time in ms
        that the connection must wait before it is closed.
        """
        if CONNECTIONS not in self._rates:
            return 0
        principal = QuotaPrincipal(ip=ip)
        wait_ms = self.wait_ms(CONNECTIONS, principal, now_ms)
        if wait_ms:
            self._throttled[CONNECTIONS] += 1
        else:
            self.charge(CONNECTIONS, principal, 1, now_ms)
        return wait_ms

    def charge_produce(self, principal: QuotaPrincipal | None, size_bytes: int, now_ms: int) -> None:
        """Count the bytes of a Produce request."""
        self.charge(PRODUCER_BYTES, principal, size_bytes, now_ms)

    def charge_request_time(self, principal: QuotaPrincipal | None, seconds: float, now_ms: int) -> None:
        """Count the time that the broker's thread spent on reading and handling a request and on sending
        its response.
        """
        self.charge(REQUEST_PERCENTAGE, principal, seconds * 100, now_ms)

    def throttle_response(
        self, api_key: int, principal: QuotaPrincipal | None, answer: Any, now_ms: int
    ) -> int:
        """Count the bytes of a Fetch response. Set the throttle time of any response, and return it in ms.

        During that time, the server must not handle further requests of the connection (KIP-219). `answer` is
        None if there is no response.
        """
        if isinstance(answer, FetchResponse):
            size_bytes = sum(
                len(part.records or b"") for topic in answer.responses for part in topic.partitions
            )
            self.charge(CONSUMER_BYTES, principal, size_bytes, now_ms)
        longest_ms = 0
        for key in _QUOTAS_OF_API.get(api_key, _OTHERS):
            wait_ms = self.wait_ms(key, principal, now_ms)
            if wait_ms:
                self._throttled[key] += 1
                longest_ms = max(longest_ms, wait_ms)
        if longest_ms and hasattr(answer, "throttle_time_ms"):
            answer.throttle_time_ms = longest_ms
        return longest_ms


def _row(entity: QuotaEntity, rates: Values) -> dict[str, object]:
    return {"entity": {kind: name or None for kind, name in entity.parts.items()}, "quotas": dict(rates)}


def _parse(content: dict[str, Any]) -> dict[QuotaEntity, Values]:
    values = {}
    for row in content["quotas"]:
        entity = normalize_entity(parse_entity(row["entity"].items()))
        values[entity] = apply_changes(entity, {}, row["quotas"].items())
    return values
