"""`oncelog users`, `oncelog acls`, and `oncelog serve` with authentication."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import oncelog
from support.security.brokers import (
    AUTHORIZER,
    PASSWORD,
    client_config,
    make_certificates,
    secured_broker,
)

from oncelog.server.embedded import Broker


def typed(line: str) -> io.TextIOWrapper:
    """Return a standard input with this text."""
    return io.TextIOWrapper(io.BytesIO(f"{line}\n".encode()))


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    certificates = make_certificates(tmp_path_factory.mktemp("certificates"))
    data_dir = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", typed(PASSWORD))
        assert oncelog("users", "set", "admin", "--data-dir", str(data_dir)).code == 0
    config = {"authorizer.class.name": AUTHORIZER, "super.users": "User:admin"}
    with secured_broker(data_dir, certificates, **config) as broker:
        for user in ("admin", "alice", "carol"):
            lines = client_config(broker, certificates, user).items()
            text = "".join(f"{key}={value}\n" for key, value in lines)
            (data_dir.parent / f"{user}.properties").write_text(text)
        yield broker


def as_user(broker: Broker, user: str, *arguments: str) -> tuple[int, str, str]:
    file = broker.data_dir.parent / f"{user}.properties"
    done = oncelog(*arguments, "--command-config", str(file), servers=broker.bootstrap_servers)
    return done.code, done.out, done.err


def test_a_producer_without_the_right_to_write_is_told_which_acl_it_needs(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", typed(PASSWORD))
    assert as_user(broker, "admin", "users", "set", "carol")[0] == 0
    assert as_user(broker, "admin", "topics", "create", "written")[0] == 0
    allow = ["acls", "add", "--allow-principal", "User:carol"]
    assert as_user(broker, "admin", *allow, "--operation", "DESCRIBE", "--topic", "written")[0] == 0

    def produce() -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", typed("hello"))
        return as_user(broker, "carol", "produce", "written")

    code, _, err = produce()
    advice = "oncelog acls add --allow-principal User:NAME --producer --topic TOPIC"
    assert code == 1 and "CLUSTER_AUTHORIZATION_FAILED (31): an idempotent producer needs WRITE" in err
    assert advice in err and "IDEMPOTENT_WRITE on the cluster" in err
    # With IDEMPOTENT_WRITE the producer starts, and the topic refuses its records.
    assert as_user(broker, "admin", *allow, "--operation", "IDEMPOTENT_WRITE", "--cluster")[0] == 0
    assert "TOPIC_AUTHORIZATION_FAILED" in produce()[2]
    followed = advice.replace("NAME", "carol").replace("TOPIC", "written").split()[1:]
    assert as_user(broker, "admin", *followed)[0] == 0
    assert produce()[0] == 0
    assert as_user(broker, "admin", "acls", "remove", "--principal", "User:carol", "--yes")[0] == 0
    assert as_user(broker, "admin", "users", "delete", "carol", "--yes")[0] == 0


def test_users_and_acls_are_added_listed_and_removed(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", typed(PASSWORD))
    assert as_user(broker, "admin", "users", "set", "alice")[:2] == (0, "user alice is set\n")
    _, out, _ = as_user(broker, "admin", "users", "list", "-o", "json")
    assert [(row["user"], row["mechanism"]) for row in json.loads(out)] == [
        (user, f"SCRAM-SHA-{size}") for user in ("admin", "alice") for size in (256, 512)
    ]
    code, _, err = as_user(broker, "alice", "users", "list")
    assert code == 1 and "CLUSTER_AUTHORIZATION_FAILED" in err
    code, _, err = as_user(broker, "alice", "topics", "create", "flights")
    assert code == 1 and "TOPIC_AUTHORIZATION_FAILED" in err
    allow = ("acls", "add", "--allow-principal", "User:alice")
    code, out, _ = as_user(broker, "admin", *allow, "--producer", "--consumer", "--topic", "flights")
    assert code == 0 and "allow User:alice CREATE on TOPIC flights" in out
    assert as_user(broker, "alice", "topics", "create", "flights")[0] == 0
    monkeypatch.setattr("sys.stdin", typed("hello"))
    assert as_user(broker, "alice", "produce", "flights")[0] == 0
    read = ("consume", "flights", "--from-beginning", "--max-messages", "1")
    assert "hello" in as_user(broker, "alice", *read)[1]
    code, _, err = as_user(broker, "alice", *read, "--group", "hers")
    assert code == 1 and err.endswith("GROUP_AUTHORIZATION_FAILED (30): group 'hers'\n")
    deny = ("acls", "add", "--deny-principal", "User:alice", "--operation", "read", "--topic", "fl")
    assert as_user(broker, "admin", *deny, "--prefixed")[:2] == (0, "deny User:alice READ on TOPIC fl*\n")
    code, _, err = as_user(broker, "alice", *read)
    assert code == 1 and "TOPIC_AUTHORIZATION_FAILED" in err
    _, out, _ = as_user(broker, "admin", "acls", "list", "--topic", "flights", "-o", "json")
    assert {(row["permission"], row["pattern"]) for row in json.loads(out)} == {
        ("ALLOW", "LITERAL"),
        ("DENY", "PREFIXED"),
    }
    remove = ("acls", "remove", "--topic", "fl", "--prefixed")
    assert "would remove: deny" in as_user(broker, "admin", *remove)[1]
    assert "removed: deny" in as_user(broker, "admin", *remove, "--yes")[1]
    assert as_user(broker, "alice", *read)[0] == 0
    assert "deleted alice" in as_user(broker, "admin", "users", "delete", "alice", "--yes")[1]
    code, _, err = as_user(broker, "alice", *read)
    assert code == 1 and "wrong user or password" in err and PASSWORD not in err


def test_an_empty_name_removes_no_acl(broker: Broker) -> None:
    """In a script, a variable that is not set gives an empty name. kafka-acls removes nothing then either."""
    add = ("acls", "add", "--deny-principal", "User:eve", "--operation", "READ", "--topic", "*")
    assert as_user(broker, "admin", *add)[0] == 0
    for option in ("--topic", "--principal"):
        assert as_user(broker, "admin", "acls", "remove", option, "", "--yes")[:2] == (0, "")
    code, out, _ = as_user(broker, "admin", "acls", "remove", "--principal", "User:eve", "--yes")
    assert (code, out) == (0, "removed: deny User:eve READ on TOPIC *\n")


def test_a_running_brokers_directory_is_left_alone(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", typed("x"))
    done = oncelog("users", "set", "eve", "--data-dir", str(broker.data_dir))
    assert done.code == 1 and "stop its broker" in done.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("acls", "add", "--topic", "t"), "--allow-principal"),
        (("acls", "add", "--allow-principal", "User:a", "--topic", "t", "--operation", "fly"), "FLY"),
        (("acls", "remove"), "--principal"),
        (("acls", "list", "--command-config", "/nowhere"), "/nowhere"),
    ],
)
def test_wrong_usage_of_users_and_acls_is_refused(arguments: tuple[str, ...], named: str) -> None:
    done = oncelog(*arguments)
    assert done.code == 2 and named in done.err


def test_serving_beyond_loopback_requires_authentication(tmp_path: Path) -> None:
    done = oncelog("serve", "--data-dir", str(tmp_path), "--listen", "0.0.0.0:0")
    assert done.code == 2 and "--insecure" in done.err
    done = oncelog("serve", "--data-dir", str(tmp_path), "--listen", "SASL_SSL://0.0.0.0:0")
    assert done.code == 2 and "ssl.keystore.location" in done.err


def test_a_broker_serves_on_several_listeners(tmp_path: Path) -> None:
    """`serve` prints one line with the name of each listener, in order.

    A listener needs authentication or a loopback address.
    """
    command = [sys.executable, "-m", "oncelog.cli.main", "serve", "--data-dir", str(tmp_path)]
    command += ["--listen", "PLAINTEXT://127.0.0.1:0", "--listen", "SASL_PLAINTEXT://127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as serving:
        try:
            assert serving.stdout is not None
            lines = [serving.stdout.readline().split("//") for _ in range(2)]
        finally:
            serving.send_signal(signal.SIGTERM)
        assert [said for said, _ in lines] == ["listening on PLAINTEXT:", "listening on SASL_PLAINTEXT:"], (
            lines
        )
        assert serving.wait(200) == 0
    both = ("--listen", "127.0.0.1:0", "--listen", "SSL://0.0.0.0:0")
    done = oncelog("serve", "--data-dir", str(tmp_path), *both)
    assert done.code == 2 and "0.0.0.0 (SSL)" in done.err and "--insecure" in done.err


def test_metrics_and_pages_beyond_loopback_need_a_token_or_insecure(tmp_path: Path) -> None:
    here = ("serve", "--data-dir", str(tmp_path), "--listen", "127.0.0.1:0", "--metrics-port", "0")
    done = oncelog(*here, "--metrics-host", "0.0.0.0")
    assert done.code == 2 and "oncelog.metrics.token" in done.err
    done = oncelog("web", "--listen", "0.0.0.0:0", servers="127.0.0.1:1")
    assert done.code == 2 and "--insecure" in done.err and "no login" in done.err
