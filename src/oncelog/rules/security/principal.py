"""The mapping from a client certificate to a principal.

Source: RFC 2253; kafka SslPrincipalMapper (KIP-371).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from oncelog.errors import ConfigError

Name = Sequence[Sequence[tuple[str, str]]]
"""A distinguished name as OpenSSL returns it: a sequence of parts, the most general one first.

Each part has one or more (type, value) pairs.
"""

_SHORT = {
    "commonName": "CN",
    "organizationalUnitName": "OU",
    "organizationName": "O",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "countryName": "C",
    "streetAddress": "STREET",
    "domainComponent": "DC",
    "userId": "UID",
}
_SPECIAL = re.compile(r'([,+"\\<>;])')
_RULE = re.compile(r"RULE:((?:\\.|[^\\/])*)/((?:\\.|[^\\/])*)/([LU]?)")


def distinguished_name(subject: Name) -> str:
    """Return the name as text with the most specific part first, such as CN=alice,OU=ops,O=shop."""
    return ",".join(
        "+".join(f"{_SHORT.get(k, k)}={_escaped(v)}" for k, v in part) for part in reversed(subject)
    )


def _escaped(value: str) -> str:
    text = _SPECIAL.sub(r"\\\1", value)
    if text.startswith(("#", " ")):
        text = "\\" + text
    return text[:-1] + "\\ " if text.endswith(" ") and len(text) > 1 else text


def principal_mapper(rules: str) -> Callable[[str], str]:
    """Return a function that maps a distinguished name to a user name, by the first rule that matches.

    `rules` is the setting ssl.principal.mapping.rules: rules separated by commas. The rule DEFAULT returns
    the whole name. In RULE:pattern/replacement/, $1 is replaced by the first group of the pattern. A final L
    or U converts the result to lower or upper case. Raises ConfigError for invalid rules. The returned
    function raises ConfigError if no rule matches.
    """
    parsed_rules = list(_parse(rules))

    def name_of(distinguished: str) -> str:
        for pattern, replacement, case in parsed_rules:
            match = pattern.fullmatch(distinguished)
            if match:
                name = "".join(part if isinstance(part, str) else match[part] or "" for part in replacement)
                return name.lower() if case == "L" else name.upper() if case == "U" else name
        raise ConfigError(f"no rule of ssl.principal.mapping.rules matches {distinguished!r}")

    return name_of


def _parse(rules: str) -> Iterable[tuple[re.Pattern[str], list[str | int], str]]:
    rest = rules.strip()
    while rest:
        match = re.match("DEFAULT", rest) or _RULE.match(rest)
        after = rest[match.end() :].lstrip() if match else rest
        if match is None or (after and not after.startswith(",")):
            raise ConfigError(f"ssl.principal.mapping.rules={rules!r}: expected DEFAULT or RULE:pattern/new/")
        if match[0] == "DEFAULT":
            yield re.compile("(?s).*"), [0], ""
        else:
            try:
                pattern, replacement = re.compile(match[1]), _replacement(match[2])
                if any(isinstance(part, int) and part > pattern.groups for part in replacement):
                    raise re.error(f"{match[2]!r} refers to a group that the pattern does not have")
                yield pattern, replacement, match[3]
            except re.error as error:
                raise ConfigError(f"ssl.principal.mapping.rules={rules!r}: {error}") from None
        rest = after[1:].lstrip()


def _replacement(text: str) -> list[str | int]:
    """Split the replacement of a rule into its parts: texts, and numbers of groups to insert.

    As in Java, a backslash makes the next character literal. `re.Match.expand` is not used, because it has
    other escapes, and would raise an error for some of them when a client connects. See
    test_a_backslash_in_a_replacement_makes_the_next_character_literal.
    """
    tokens = re.findall(r"\\(.)|\$(\d)|([^\\])", text, re.S)
    return [int(group) if group else escaped or plain for escaped, group, plain in tokens]
