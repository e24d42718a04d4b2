"""From a client's certificate to its principal. Source: RFC 2253, Kafka's SslPrincipalMapper (KIP-371)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from oncelog.errors import ConfigError

Name = Sequence[Sequence[tuple[str, str]]]
"""A distinguished name as OpenSSL gives it: the widest part first, each part a set of (type, value)."""

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
    """`CN=alice,OU=ops,O=shop`: the narrowest part first."""
    return ",".join(
        "+".join(f"{_SHORT.get(k, k)}={_escaped(v)}" for k, v in part) for part in reversed(subject)
    )


def _escaped(value: str) -> str:
    text = _SPECIAL.sub(r"\\\1", value)
    if text.startswith(("#", " ")):
        text = "\\" + text
    return text[:-1] + "\\ " if text.endswith(" ") and len(text) > 1 else text


def principal_mapper(rules: str) -> Callable[[str], str]:
    """A function from a distinguished name to a user's name, by the first rule that fits.

    `rules`: DEFAULT (the whole name), RULE:pattern/replacement/ with $1 for groups and L or U for the case,
    separated by commas. Raises ConfigError.
    """
    made = list(_parse(rules))

    def name_of(distinguished: str) -> str:
        for pattern, replacement, case in made:
            found = pattern.fullmatch(distinguished)
            if found:
                name = found.expand(replacement)
                return name.lower() if case == "L" else name.upper() if case == "U" else name
        raise ConfigError(f"no rule of ssl.principal.mapping.rules fits {distinguished!r}")

    return name_of


def _parse(rules: str) -> Iterable[tuple[re.Pattern[str], str, str]]:
    rest = rules.strip()
    while rest:
        found = re.match("DEFAULT", rest) or _RULE.match(rest)
        after = rest[found.end() :].lstrip() if found else rest
        if found is None or (after and not after.startswith(",")):
            raise ConfigError(f"ssl.principal.mapping.rules={rules!r}: expected DEFAULT or RULE:pattern/new/")
        if found[0] == "DEFAULT":
            yield re.compile("(?s).*"), r"\g<0>", ""
        else:
            try:
                pattern = re.compile(found[1])
                if any(int(group) > pattern.groups for group in re.findall(r"\$(\d)", found[2])):
                    raise re.error(f"{found[2]!r} names a group that is not there")
                yield pattern, re.sub(r"\$(\d)", r"\\g<\1>", found[2]), found[3]
            except re.error as error:
                raise ConfigError(f"ssl.principal.mapping.rules={rules!r}: {error}") from None
        rest = after[1:].lstrip()
