"""Quotas of authenticated users, and the permissions to change quotas."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.broker import RawClient
from support.security.brokers import AUTHORIZER, PASSWORD, client_config, secured_broker
from support.security.requests import log_in

from oncelog.client.admin.blocking import Admin
from oncelog.errors import ClusterAuthorizationFailed
from oncelog.rules.limits.quotas import DEFAULT, QuotaEntity
from oncelog.wire import messages as m


def test_quotas_are_per_user(tmp_path: Path) -> None:
    config = {"authorizer.class.name": AUTHORIZER, "super.users": "User:admin", "quota.window.num": 1}
    with secured_broker(tmp_path, users=("admin", "alice", "bob"), **config) as broker:

        def asks(user: str) -> int:
            with RawClient(broker.bootstrap_servers) as client:
                log_in(client, user, PASSWORD)
                answer: m.MetadataResponse = client.ask(m.MetadataRequest(topics=[]), 9)
                return answer.throttle_time_ms

        with Admin(client_config(broker, None, "admin")) as admin:
            admin.alter_client_quotas({QuotaEntity("alice"): {"request_percentage": 0.000001}})
            assert asks("alice") == 1_000
            assert asks("bob") == 0
            admin.alter_client_quotas(
                {
                    QuotaEntity("alice"): {"request_percentage": 100},
                    QuotaEntity(DEFAULT): {"request_percentage": 0.000001},
                }
            )
            assert asks("alice") == 0
            assert asks("bob") == 1_000
        with Admin(client_config(broker, None, "bob")) as admin:
            with pytest.raises(ClusterAuthorizationFailed):
                admin.alter_client_quotas({QuotaEntity("bob"): {"request_percentage": 100}})
            with pytest.raises(ClusterAuthorizationFailed):
                admin.describe_client_quotas()
