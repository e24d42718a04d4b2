"""Tests of rules/security/auth_state.py against the table in its docstring, and of principal.py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from oncelog.errors import ConfigError
from oncelog.rules.security import auth_state
from oncelog.rules.security.auth_state import (
    AuthState,
    may_authenticate_again,
    next_state,
    session_lifetime_ms,
)
from oncelog.rules.security.principal import distinguished_name, principal_mapper

COLUMNS = (auth_state.API_VERSIONS, auth_state.SASL_HANDSHAKE, auth_state.SASL_AUTHENTICATE, 3)


def rows() -> list[tuple[str, list[str]]]:
    # Parse the source: `python -OO` drops the docstring that contains the table.
    source = Path(auth_state.__file__).read_text()
    lines = (ast.get_docstring(ast.parse(source)) or "").splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip().startswith("state "))
    cells = [line.split() for line in lines[start + 1 : start + 1 + len(AuthState)]]
    return [(row[0], row[1:]) for row in cells]


@pytest.mark.parametrize(("state", "expected"), rows())
def test_each_state_allows_the_requests_of_the_table(state: str, expected: list[str]) -> None:
    for api_key, name in zip(COLUMNS, expected, strict=True):
        found = next_state(AuthState[state], api_key)
        assert (found.name if found else "-") == name


@pytest.mark.parametrize(
    ("expires_ms", "last_begun_ms", "now_ms", "expected"),
    [
        (None, None, 5_000, False),
        (9_000, None, 5_000, True),
        (9_000, 4_001, 5_000, False),
        (9_000, 4_000, 5_000, True),
    ],
)
def test_a_session_that_expires_may_be_renewed_once_a_second(
    expires_ms: int | None, last_begun_ms: int | None, now_ms: int, expected: bool
) -> None:
    assert may_authenticate_again(expires_ms, last_begun_ms, now_ms) is expected


def test_a_handshake_that_comes_too_early_changes_no_state() -> None:
    def after(state: AuthState) -> AuthState | None:
        return next_state(state, auth_state.SASL_HANDSHAKE, may_authenticate_again=False)

    assert after(AuthState.AUTHENTICATED) is AuthState.AUTHENTICATED
    assert after(AuthState.SESSION_EXPIRED) is None
    assert after(AuthState.UNAUTHENTICATED) is AuthState.HANDSHAKE_DONE


def test_the_shorter_session_lifetime_applies() -> None:
    assert session_lifetime_ms(0, None) == 0
    assert session_lifetime_ms(500, None) == 500
    assert session_lifetime_ms(0, 700) == 700
    assert session_lifetime_ms(500, 700) == 500
    assert session_lifetime_ms(900, 700) == 700


SUBJECT = (
    (("countryName", "DE"),),
    (("organizationName", 'Shop, "Inc"'),),
    (("organizationalUnitName", "ops"), ("userId", "7")),
    (("commonName", " Alice"),),
)


def test_a_distinguished_name_starts_with_its_most_specific_part() -> None:
    assert distinguished_name(SUBJECT) == 'CN=\\ Alice,OU=ops+UID=7,O=Shop\\, \\"Inc\\",C=DE'


@pytest.mark.parametrize(
    ("rules", "name"),
    [
        ("DEFAULT", "CN=Alice,OU=ops"),
        ("RULE:^CN=(.*?),.*$/$1/", "Alice"),
        ("RULE:^CN=(.*?),.*$/$1/L", "alice"),
        ("RULE:^CN=(.*?),.*$/$1/U, DEFAULT", "ALICE"),
        ("RULE:^O=(.*)$/$1/,RULE:^CN=(.*?),OU=(.*?)$/$1@$2/L", "alice@ops"),
        ("RULE:^O=(.*)$/$1/,DEFAULT", "CN=Alice,OU=ops"),
    ],
)
def test_the_first_matching_rule_maps_a_name(rules: str, name: str) -> None:
    assert principal_mapper(rules)("CN=Alice,OU=ops") == name


@pytest.mark.parametrize(
    ("replacement", "name"),
    [
        (r"$1\.$2", "Alice.ops"),
        (r"\d$2", "dops"),
        (r"CORP\\$1", r"CORP\Alice"),
        (r"\$1", "$1"),
        ("$1$3", "Alice"),
    ],
)
def test_a_backslash_in_a_replacement_makes_the_next_character_literal(replacement: str, name: str) -> None:
    """As in Java. A group that took no part in the match is empty."""
    assert principal_mapper(f"RULE:^CN=(.*?),OU=(.*?)(,O=.*)?$/{replacement}/")("CN=Alice,OU=ops") == name


@pytest.mark.parametrize("rules", ["RULE:x", "CN", "RULE:(/x/", "DEFAULT RULE:x/y/", "RULE:a/$1/"])
def test_invalid_mapping_rules_are_rejected(rules: str) -> None:
    with pytest.raises(ConfigError, match="mapping"):
        principal_mapper(rules)("a")


def test_a_name_that_no_rule_matches_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no rule"):
        principal_mapper("RULE:^O=(.*)$/$1/")("CN=Alice")
