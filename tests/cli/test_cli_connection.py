"""A command chooses its cluster in the order of precedence that `--help` shows."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import pytest
from support.cli import oncelog
from support.client import append, batch_of

from oncelog import Consumer, TopicPartition
from oncelog.cli.common import DEFAULT_SERVERS, make_client_config
from oncelog.cli.main import COMMANDS
from oncelog.errors import NotConnectedError

_numbers = itertools.count()
DEAD = "127.0.0.1:1"

WAYS = {
    "the option": (["-b", "{}"], {}, ""),
    "the long option": (["--bootstrap-server", "{}"], {}, ""),
    "-X": (["-X", "bootstrap.servers={}"], {}, ""),
    "the environment": ([], {"ONCELOG_BOOTSTRAP_SERVERS": "{}"}, ""),
    "the old name in the environment": ([], {"ONCELOG_BOOTSTRAP_SERVER": "{}"}, ""),
    "the file": ([], {}, "bootstrap.servers={}\n"),
    "a file that the environment names": ([], {"ONCELOG_COMMAND_CONFIG": "FILE"}, "bootstrap.servers = {}"),
    "the option before the environment": (["-b", "{}"], {"ONCELOG_BOOTSTRAP_SERVERS": DEAD}, ""),
    "-X before the environment": (["-X", "bootstrap.servers={}"], {"ONCELOG_BOOTSTRAP_SERVERS": DEAD}, ""),
    "-X before the file": (["-X", "bootstrap.servers={}"], {}, f"bootstrap.servers={DEAD}"),
    "the environment before the file": (
        [], {"ONCELOG_BOOTSTRAP_SERVERS": "{}"}, f"bootstrap.servers={DEAD}"),
    "-X with underscores": (["-X", "bootstrap_servers={}"], {}, ""),
    "-X with underscores before the file": (
        ["-X", "bootstrap_servers={}"], {}, f"bootstrap.servers={DEAD}"),
    "-X before a file with underscores": (
        ["-X", "bootstrap.servers={}"], {}, f"bootstrap_servers={DEAD}"),
    "the environment before a file with underscores": (
        [], {"ONCELOG_BOOTSTRAP_SERVERS": "{}"}, f"bootstrap_servers={DEAD}"),
    "a file with underscores": ([], {}, "bootstrap_servers={}\n"),
    "the same with a comma at its end": (["-b", "{}", "-X", "bootstrap.servers={},"], {}, ""),
    "all of them, where they agree": (
        ["-b", "{}", "-X", "bootstrap.servers={}"],
        {"ONCELOG_BOOTSTRAP_SERVER": "{}"}, "bootstrap.servers={}"),
}  # fmt: skip


@pytest.fixture(scope="module")
def broker_config() -> Mapping[str, object]:
    return {"transaction.partition.verification.enable": False}


@pytest.fixture(autouse=True)
def _nothing_at_the_default_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the default address unreachable, even if a broker is running on this machine."""
    monkeypatch.setattr("oncelog.cli.common.DEFAULT_SERVERS", DEAD)
    monkeypatch.setenv("ONCELOG_OFFSETS_NAMED_NOWHERE", "x")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")


@pytest.mark.parametrize("way", WAYS)
def test_a_command_uses_the_cluster_of_its_option(
    way: str, ours: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, environment, text = WAYS[way]
    file = tmp_path / "client.properties"
    file.write_text(text.format(ours))
    topic = f"told-{next(_numbers)}"
    arguments = [part.format(ours) for part in arguments]
    if text and "ONCELOG_COMMAND_CONFIG" not in environment:
        arguments += ["--command-config", str(file)]
    for name, value in environment.items():
        monkeypatch.setenv(name, str(file) if value == "FILE" else value.format(ours))
    made = oncelog("topics", "create", topic, *arguments)
    assert (made.code, made.out) == (0, f"created {topic}\n"), made.err
    gone = oncelog("topics", "delete", topic, "--yes", *arguments)
    assert gone.out == f"deleted {topic}\n" and f"on the cluster at {ours}:" in gone.err


def test_without_a_cluster_the_default_address_is_used() -> None:
    assert make_client_config([], [], {})["bootstrap.servers"] == DEAD
    assert DEFAULT_SERVERS == "127.0.0.1:9092"


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (["-b", "a:1", "-X", "bootstrap.servers=b:2"], {}, ["-b a:1", "-X bootstrap.servers=b:2"]),
        (["-b", "a:1", "-b", "b:2"], {}, ["-b a:1", "-b b:2"]),
        (["-b", "a:1", "-X", "bootstrap_servers=b:2"], {}, ["-b a:1", "-X bootstrap_servers=b:2"]),
        (
            ["-X", "bootstrap.servers=a:1", "-X", "bootstrap.servers=b:2"],
            {},
            ["-X bootstrap.servers=a:1", "-X bootstrap.servers=b:2"],
        ),
        (
            [],
            {"ONCELOG_BOOTSTRAP_SERVERS": "a:1", "ONCELOG_BOOTSTRAP_SERVER": "b:2"},
            ["ONCELOG_BOOTSTRAP_SERVERS=a:1", "ONCELOG_BOOTSTRAP_SERVER=b:2"],
        ),
    ],
)
def test_two_clusters_are_an_error_that_names_both(
    arguments: list[str], environment: dict[str, str], named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    got = oncelog("topics", "delete", "t", "--yes", *arguments)
    assert got.code == 2 and all(name in got.err for name in named)


def test_an_empty_address_is_not_the_default(tmp_path: Path) -> None:
    file = tmp_path / "c.properties"
    file.write_text("bootstrap.servers=\n")
    for arguments in (["-b", ""], ["-X", "bootstrap.servers="], ["--command-config", str(file)]):
        got = oncelog("topics", "list", *arguments)
        assert got.code == 2 and "bootstrap.servers" in got.err


@pytest.mark.parametrize("way", ["-X", "the environment", "the file"])
@pytest.mark.parametrize("key", ["request.timeout.ms"])
def test_other_settings_have_the_same_precedence(
    way: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = ["the file", "the environment", "-X"]
    known = order[: order.index(way) + 1]
    if "the environment" in known:
        monkeypatch.setenv("ONCELOG_REQUEST_TIMEOUT_MS", "the environment")
    given = [f"{key}=-X"] if "-X" in known else []
    assert make_client_config([], given, {key: "the file"})[key] == way


ARGUMENTS = {
    "topics alter": ["t", "-p", "2"],
    "topics create": ["t"],
    "topics delete": ["t", "--yes"],
    "topics describe": ["t"],
    "topics trim": ["t", "--to-end", "--yes"],
    "configs describe": ["--topic", "t"],
    "configs alter": ["--topic", "t", "--set", "a=b", "--yes"],
    "produce": ["t", "/dev/null"],
    "load": [__file__, "--topic", "t", "--id", "i", "--format", "lines"],
    "consume": ["t", "--until-end"],
    "producers describe": ["t"],
    "producers list": ["t"],
    "groups delete": ["g", "--yes"],
    "groups delete-offsets": ["g", "t", "--yes"],
    "groups describe": ["g"],
    "groups reset-offsets": ["g", "--topic", "t", "--to-latest", "--yes"],
    "acls add": ["--allow-principal", "User:a", "--topic", "t", "--operation", "READ"],
    "acls remove": ["--topic", "t", "--yes"],
    "users delete": ["u", "--yes"],
    "users set": ["u"],
    "quotas remove": ["--user", "u", "--yes"],
    "quotas set": ["--user", "u", "producer_byte_rate=1"],
    "transactions abort": ["t:0", "--producer-id", "1", "--yes"],
    "transactions describe": ["x"],
    "transactions terminate": ["x", "--yes"],
    "audit": ["t"],
    "explain": ["lost-ack"],
}
"""The arguments of each command that needs some before it connects."""


def connecting_commands() -> Iterator[str]:
    """Return the names of all commands that connect to the cluster named in the environment.

    `trial` creates topics, so it uses its own broker unless an option names a cluster.
    """

    def walk(command: click.Command, name: str) -> Iterator[str]:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for sub in command.list_commands(context):
                found = command.get_command(context, sub)
                assert found is not None
                yield from walk(found, f"{name} {sub}")
        elif any("--bootstrap-server" in option.opts for option in command.params):
            yield name

    for name in COMMANDS:
        if name not in ("bench", "trial"):
            yield from walk(importlib.import_module(f"oncelog.cli.{name}").command, name)


@pytest.mark.parametrize("name", list(connecting_commands()))
def test_every_command_uses_the_cluster_of_the_environment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def refuse(*settings: object, **_: object) -> None:
        asked.append(settings)
        raise NotConnectedError("as far as this test goes")

    monkeypatch.setenv("ONCELOG_BOOTSTRAP_SERVERS", "named.example:7")
    monkeypatch.setattr("sys.stdin", io.StringIO("password\n"))
    # Import all modules first. A module that is first imported below would keep the replacement after the
    # test.
    names = (
        "client.connection.cluster",
        "client.admin.aio",
        "client.consumer.aio",
        "client.producer.driver",
    )
    for module in [importlib.import_module(f"oncelog.{name}") for name in names]:
        monkeypatch.setattr(module, "parse_bootstrap", refuse)
    monkeypatch.setattr("oncelog.spark.session.any_session", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("oncelog.spark.audit.audit.audit_topic", refuse)
    got = oncelog(*name.split(), *ARGUMENTS.get(name, []))
    assert got.code != 2, got.err
    assert asked and "named.example:7" in str(asked), (got.err, asked)


DESTRUCTIVE = {
    "topics delete": ["{topic}"],
    "topics trim": ["{topic}", "--to-end"],
    "configs alter": ["--topic", "{topic}", "--set", "retention.ms=1"],
    "groups delete": ["{group}"],
    "groups delete-offsets": ["{group}", "{topic}"],
    "groups reset-offsets": ["{group}", "--topic", "{topic}", "--to-earliest"],
    "acls remove": ["--topic", "{topic}"],
    "quotas remove": ["--user", "u"],
    "transactions abort": ["{topic}:0", "--producer-id", "77"],
}


@pytest.mark.parametrize("name", DESTRUCTIVE)
def test_a_confirmation_names_the_cluster(name: str, ours: str) -> None:
    group, topic = f"g-{next(_numbers)}", f"t-{next(_numbers)}"
    assert oncelog("topics", "create", topic, servers=ours).code == 0
    oncelog("quotas", "set", "--user", "u", "producer_byte_rate=1", servers=ours)
    open_one = batch_of(b"x", producer_id=77, producer_epoch=0, base_sequence=0, is_transactional=True)
    append(ours, TopicPartition(topic, 0), open_one, transactional_id="gone")
    with Consumer({"bootstrap.servers": ours, "group.id": group}, enable_auto_commit=False) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        consumer.commit({TopicPartition(topic, 0): 0})
    arguments = [part.format(topic=topic, group=group) for part in DESTRUCTIVE[name]]
    got = oncelog(*name.split(), *arguments, servers=ours)
    if name == "acls remove":
        # of the commands, only this one fails: the broker has no ACLs to remove
        assert f"on the cluster at {ours}:" in got.err
        return
    assert got.code == 0, got.err
    said = got.out + got.err
    assert f"on the cluster at {ours}:" in got.err
    assert re.search(rf"(--yes|with --yes).* on the cluster at {ours}", said)


def test_explain_runs_on_the_cluster_of_the_environment(ours: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONCELOG_BOOTSTRAP_SERVERS", ours)
    got = oncelog("explain", "lost-ack", "-o", "json")
    assert got.code == 0 and json.loads(got.out)
