"""`oncelog profile`, and the cluster and settings that commands take from a profile."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from support.cli import Outcome, oncelog

from oncelog.cli.common import ClientConfig, cluster_text, make_client_config, only_settings_of
from oncelog.cli.profiles import Profiles, config_path, parse_profiles
from oncelog.config import ADMIN
from oncelog.errors import ConfigError

SERVERS = "bootstrap.servers"


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the file of profiles, which does not exist yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ONCELOG_BOOTSTRAP_SERVERS", raising=False)
    monkeypatch.delenv("ONCELOG_PROFILE", raising=False)
    return tmp_path / "config" / "oncelog" / "config.toml"


def profile(*arguments: str) -> Outcome:
    return oncelog("profile", *arguments)


def test_a_profile_is_created_used_shown_and_deleted(file: Path, ours: str, tmp_path: Path) -> None:
    assert profile("list", "-o", "json").out == "[]\n"
    settings = tmp_path / "client.properties"
    settings.write_text("linger.ms=7\nbootstrap.servers=other:1\n")
    made = profile("create", "prod", ours, "-X", "client_id=me", "--command-config", str(settings))
    assert (made.code, made.out) == (0, f"created prod in {file}\n"), made.err
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert oncelog("topics", "list", "-X", "request.timeout.ms=200").code != 0, "no profile is used yet"
    assert profile("use", "prod").out == f"commands use prod: {ours}\n"
    (row,) = json.loads(profile("list", "-o", "json").out)
    assert row == {"profile": "prod", "bootstrap_servers": ours, "current": True}
    shown = {row["name"]: row["value"] for row in json.loads(profile("show", "-o", "json").out)}
    assert shown == {SERVERS: ours, "client.id": "me", "linger.ms": "7"}
    listed = oncelog("topics", "list")
    assert listed.code == 0, "linger.ms is a setting of producers, and no error of an admin client"
    dry = oncelog("topics", "delete", "nosuch", "--yes")
    assert f"on the cluster at {ours} (profile prod):" in dry.err
    assert "would delete" in profile("delete", "prod").out and file.read_text().count("prod") > 1
    assert profile("delete", "prod", "--yes").out == "deleted prod\n"
    assert parse_profiles(file.read_text()) == Profiles()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["create", "a b", "h:1"], "use up to 64 letters"),
        (["create", "p", "h"], "expected HOST:PORT"),
        (["create", "p", ""], "bootstrap.servers is not set"),
        (["create", "p", "h:1", "-X", "sasl.pasword=x"], "did you mean sasl.password"),
        (["create", "p", "h:1", "-X", "linger.ms=soon"], "expected a whole number"),
        (["create", "p", "h:1", "-X", "client.id=\udcff"], "must be UTF-8"),
        (["create", "known", "h:1"], "replace it with --replace"),
        (["use", "knwon"], "there is no profile 'knwon'; did you mean 'known'?"),
        (["show", "x"], "there is no profile 'x'; see `oncelog profile list`"),
        (["show"], "no profile is in use"),
        (["delete", "x", "--yes"], "there is no profile 'x'"),
    ],
)
def test_wrong_profiles_are_usage_errors(arguments: list[str], says: str, file: Path) -> None:
    assert profile("create", "known", "h:1").code == 0
    before = file.read_text()
    got = profile(*arguments)
    assert got.code == 2 and says in got.err, got.err
    assert file.read_text() == before


def test_a_password_is_in_the_file_but_not_shown(file: Path) -> None:
    assert profile("create", "p", "h:1", "-X", 'sasl.password=se"cret', "--replace").code == 0
    shown = json.loads(profile("show", "p", "-o", "json").out)
    assert {row["name"]: row["value"] for row in shown} == {SERVERS: "h:1", "sasl.password": "(hidden)"}
    assert parse_profiles(file.read_text()).profiles["p"]["sasl.password"] == 'se"cret'


def test_credentials_of_the_schema_registry_are_not_shown(file: Path) -> None:
    url = "http://alice:secret@h:8081,http://i:8081"
    settings = ("-X", f"schema.registry.url={url}", "-X", "bearer.auth.token=secret")
    assert profile("create", "p", "h:1", *settings, "--replace").code == 0
    shown = json.loads(profile("show", "p", "-o", "json").out)
    assert {row["name"]: row["value"] for row in shown} == {
        SERVERS: "h:1",
        "schema.registry.url": "http://(hidden)@h:8081,http://i:8081",
        "bearer.auth.token": "(hidden)",
    }
    assert parse_profiles(file.read_text()).profiles["p"]["schema.registry.url"] == url


def test_a_command_with_an_unknown_profile_connects_to_nothing() -> None:
    assert profile("create", "known", "h:1").code == 0
    got = oncelog("topics", "delete", "t", "--yes", "--profile", "knwon")
    assert got.code == 2 and "did you mean 'known'?" in got.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("current = ", "is not TOML"),
        ("x = 1", "'x' is not known"),
        ("current = 1", "`current` must be text"),
        ("profiles = 1", "`current` must be text"),
        ("[profiles.p]", "profile 'p' needs"),
        ('[profiles.p]\nbootstrap.servers = "h:1"', "profile 'p' needs"),
        ('[profiles.p]\n"bootstrap.servers" = "h:1"\nx = []', "x must be text or a number"),
        ('[profiles."a b"]', "use up to 64 letters"),
        ('current = "p"', "there is no profile 'p'"),
        ("x = " + "[" * 10_000, "is not TOML"),
    ],
)
def test_a_damaged_file_is_an_error_with_its_name(text: str, says: str, file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    got = oncelog("topics", "list", "-b", "127.0.0.1:1")
    assert got.code == 2 and says in got.err and str(file) in got.err


PROD = {SERVERS: "prod:1", "client.id": "of-profile", "linger.ms": "7"}


def config_of(
    servers: Sequence[str] = (),
    properties: Sequence[str] = (),
    of_file: Mapping[str, str] = MappingProxyType({}),
    **named: str,
) -> ClientConfig:
    profiles = Profiles(named.get("current"), {"prod": PROD, "other": {SERVERS: "other:1"}})
    return make_client_config(servers, properties, of_file, profiles, named.get("profile"))


def test_a_profile_gives_what_nothing_else_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(current="prod") == PROD and config_of(profile="prod", current="other") == PROD
    assert config_of(properties=["client_id=x"], current="prod")["client.id"] == "x"
    assert config_of(of_file={"client.id": "x"}, current="prod")["client.id"] == "x"
    monkeypatch.setenv("ONCELOG_CLIENT_ID", "x")
    assert config_of(current="prod")["client.id"] == "x"


def test_the_current_profile_is_not_used_for_another_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for config in (
        config_of(["dev:1"], current="prod"),
        config_of([], ["bootstrap.servers=dev:1"], current="prod"),
        config_of(of_file={SERVERS: "dev:1"}, current="prod"),
    ):
        assert config == {SERVERS: "dev:1"} and cluster_text(config) == "the cluster at dev:1"
    assert config_of(["prod:1"], current="prod") == PROD
    monkeypatch.setenv("ONCELOG_BOOTSTRAP_SERVERS", "dev:1")
    assert config_of(current="prod") == {SERVERS: "dev:1"}


def test_a_profile_and_another_cluster_beside_it_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in ([["dev:1"]], [[], ["bootstrap.servers=dev:1"]], [[], [], {SERVERS: "dev:1"}]):
        with pytest.raises(Exception, match=r"--profile prod and .*dev:1 name different clusters"):
            config_of(*arguments, profile="prod")  # type: ignore[arg-type]
    assert config_of(["prod:1"], profile="prod") == PROD


def test_settings_of_a_profile_for_other_clients_are_left_out() -> None:
    config = config_of(properties=["retries=3"], current="prod")
    assert only_settings_of(ADMIN, config).keys() == {SERVERS, "client.id", "retries"}, "-X is refused later"
    assert cluster_text(config) == "the cluster at prod:1 (profile prod)"


def test_a_relative_config_home_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert config_path() == Path("/home/somebody/.config/oncelog/config.toml")


def test_a_link_to_the_file_stays_a_link(file: Path, tmp_path: Path) -> None:
    file.parent.mkdir(parents=True)
    file.symlink_to(tmp_path / "dotfiles.toml")
    assert profile("create", "p", "h:1").code == 0
    assert file.is_symlink() and "h:1" in (tmp_path / "dotfiles.toml").read_text()


def test_names_of_settings_are_checked_like_those_of_options() -> None:
    with pytest.raises(ConfigError):
        parse_profiles('[profiles.p]\n"bootstrap.servers" = "h:1"\n"client.id" = {a = 1}')
