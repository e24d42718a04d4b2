"""For each API, user and resource, our broker gives the same response as Apache Kafka's authorizer."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from oncelog_devtools.apache_kafka import ApacheKafka
from support.broker import RawClient
from support.security.brokers import AUTHORIZER, PASSWORD, client_config, secured_broker
from support.security.requests import GRANTS, GROUP, TOPIC, TRANSACTION, log_in, requests, rights_in

import oncelog
from oncelog.broker.security.acl_operations import APIS_WITHOUT_ACL, REQUIRED_OPERATIONS
from oncelog.broker.state import OFFERED
from oncelog.client.admin.blocking import Admin, NewTopic
from oncelog.rules.security.authorization import Acl, Operation, PatternType, Permission, ResourceType
from oncelog.rules.security.scram import Mechanism

Rights = dict[tuple[str, str], list[str]]

RECORDING = Path(__file__).parents[1] / "golden" / "authorization.json"
"""The results of Apache Kafka: for each request, the permissions that its response shows, and the users that
have them.

With ONCELOG_RECORD=1, the soak test writes this file.
"""

SETTINGS = {
    "authorizer.class.name": AUTHORIZER,
    "super.users": "User:admin;User:ANONYMOUS",
    "oncelog.transaction.version": 1,
}
DENIED, NOTHING = "denied", "nothing"


def acls() -> Iterator[Acl]:
    """Yield the ACLs of GRANTS, and those of a user who may do everything that is not denied."""
    for user, (kind, name, operation) in GRANTS.items():
        is_prefix = kind in (ResourceType.TOPIC, ResourceType.TRANSACTIONAL_ID)
        pattern = PatternType.PREFIXED if is_prefix else PatternType.LITERAL
        yield Acl(kind, name, pattern, f"User:{user}", "*", operation, Permission.ALLOW)
    for kind, name, operation in (
        (ResourceType.TOPIC, TOPIC, Operation.READ),
        (ResourceType.GROUP, GROUP, Operation.DESCRIBE),
        (ResourceType.TRANSACTIONAL_ID, TRANSACTION, Operation.ALL),
        (ResourceType.CLUSTER, "kafka-cluster", Operation.ALTER),
    ):
        everything = "kafka-cluster" if kind is ResourceType.CLUSTER else "*"
        for at, what, permission in (
            (everything, Operation.ALL, Permission.ALLOW),
            (name, operation, Permission.DENY),
        ):
            yield Acl(kind, at, PatternType.LITERAL, f"User:{DENIED}", "127.0.0.1", what, permission)


def prepare(config: dict[str, str]) -> bytes:
    """Create the topic, committed offsets, transactional id, users and ACLs that the requests use. Return the
    topic's id.
    """
    with Admin(config) as admin:
        admin.create_topics([NewTopic(TOPIC, num_partitions=1)])
        admin.alter_group_offsets(GROUP, {oncelog.TopicPartition(TOPIC, 0): oncelog.OffsetAndMetadata(0)})
        with oncelog.Producer({**config, "transactional.id": TRANSACTION}) as producer:
            producer.init_transactions()
        for user in (NOTHING, DENIED, *GRANTS):
            admin.set_user(user, PASSWORD, mechanisms=[Mechanism.SCRAM_SHA_256], iterations=4096)
        admin.create_acls(list(acls()))
        assert admin.describe_acls() == sorted(acls())
        text = admin.describe_topics([TOPIC])[TOPIC].topic_id
        assert text is not None
        return base64.urlsafe_b64decode(text + "==")


def ask_all(address: str, topic_id: bytes) -> Rights:
    found: Rights = {}
    for user in (NOTHING, DENIED, *GRANTS):
        with RawClient(address) as client:
            log_in(client, user, PASSWORD)
            for name, message, version in requests(topic_id):
                found[user, name] = rights_in(client.ask(message, version))
    return found


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Rights:
    data_dir: Path = tmp_path_factory.mktemp("data")
    with secured_broker(data_dir, users=("admin",), **SETTINGS) as broker:
        topic_id = prepare(client_config(broker, None, "admin"))
        return ask_all(broker.bootstrap_servers, topic_id)


@pytest.fixture(scope="module")
def theirs(kafka_class_path: str) -> Rights:
    properties = {key: value for key, value in SETTINGS.items() if not key.startswith("oncelog.")}
    properties |= {
        "sasl.enabled.mechanisms": "SCRAM-SHA-256",
        "listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
    }
    with ApacheKafka(properties=properties, also_listen=["SASL_PLAINTEXT"]) as kafka:
        topic_id = prepare({"bootstrap.servers": kafka.bootstrap_servers})
        return ask_all(f"127.0.0.1:{kafka.nodes[0].ports['SASL_PLAINTEXT']}", topic_id)


def by_request(found: Rights) -> dict[str, dict[str, list[str]]]:
    made: dict[str, dict[str, list[str]]] = {}
    for (user, request), answer in found.items():
        made.setdefault(request, {}).setdefault(" ".join(answer), []).append(user)
    return made


def test_errors_of_each_user_and_request_match_the_recording(ours: Rights) -> None:
    assert by_request(ours) == json.loads(RECORDING.read_text())


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_recording_matches_apache_kafka(theirs: Rights) -> None:
    if os.environ.get("ONCELOG_RECORD"):
        RECORDING.write_text(json.dumps(by_request(theirs), indent=1) + "\n")
    assert by_request(theirs) == json.loads(RECORDING.read_text())


def test_every_api_is_in_the_table() -> None:
    assert set(REQUIRED_OPERATIONS) | APIS_WITHOUT_ACL == {api.name for api in OFFERED.values()}


def test_a_user_without_rights_is_refused_every_request(ours: Rights) -> None:
    refusals = {f"{kind}error_code={code}" for kind in ("", "partition_") for code in (29, 30, 31, 53)}
    harmless = {
        "DescribeCluster",
        "ListGroups",
        "ListTransactions",
        "Metadata all",
        "DescribeTopicPartitions []",
    }
    harmless.add("Produce by unknown id")
    for (user, name), found in ours.items():
        if user == NOTHING and name not in harmless:
            assert refusals & set(found), (name, found)
