"""Quotas of users, client ids and addresses, and the SCRAM users themselves."""

from __future__ import annotations

from random import Random
from typing import Any

from differential.sequence import SALT, SENTINEL, Body, Rule, Sequence, Step, Subject, name

LENGTHS = (5, 10, 15)
USER, CLIENT, IP = "user", "client-id", "ip"
KEYS = {
    "producer_byte_rate": (1024.0, 1.0, 0.0, -1.0, 1.5, 1e18),
    "consumer_byte_rate": (1024.0, 2.0, 0.5),
    "request_percentage": (50.0, 0.1, 0.0, -5.0, 1e9),
    "controller_mutation_rate": (1.0, 0.5, 0.0),
    "connection_creation_rate": (10.0, 0.5, 3.0, -1.0),
    "nonsense": (1.0,),
    "": (1.0,),
}
EXACT, DEFAULT, SPECIFIED = 0, 1, 2
ADDRESSES = ("10.1.{}.1", "10.1.{}.2")


class Quotas:
    """Draws the steps of an administrator who changes quotas and users."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.steps: list[Step] = []

    def _often(self, chance: float) -> bool:
        return self._random.random() < chance

    def _name(self) -> Any:
        texts = ["u", "u", "v", "w", "ü", "a b", "a/b", "*"]
        return name(self._random.choice(texts))

    def _entity(self) -> list[Body]:
        """Return an entity with a name of this sequence, or an entity that both brokers refuse."""
        random = self._random
        user = {"entity_type": USER, "entity_name": self._name()}
        client = {"entity_type": CLIENT, "entity_name": self._name()}
        anybody = {"entity_type": USER, "entity_name": None}
        any_client = {"entity_type": CLIENT, "entity_name": None}
        good = [[user], [client], [user, client], [client, user], [user, any_client], [anybody, client]]
        bad = [
            [],
            [user, user],
            [{"entity_type": "group", "entity_name": "g"}],
            [{"entity_type": USER, "entity_name": ""}],
            [{"entity_type": "", "entity_name": "x"}],
            [{"entity_type": IP, "entity_name": "256.1.1.1"}],
            [user, {"entity_type": IP, "entity_name": "10.0.0.1"}],
        ]
        return random.choice(bad) if self._often(0.1) else random.choice(good)

    def _changes(self) -> list[Body]:
        random = self._random
        keys = random.sample(sorted(KEYS), random.choice([0, 1, 1, 1, 2, 3]))
        if self._often(0.8):
            keys = [
                key
                for key in keys
                if key.endswith(("rate", "percentage")) and key != "connection_creation_rate"
            ]
        rows = [{"key": key, "value": random.choice(KEYS[key]), "remove": self._often(0.3)} for key in keys]
        return rows + rows[:1] if self._often(0.03) else rows

    def alter(self) -> None:
        rows = [
            {"entity": self._entity(), "ops": self._changes()} for _ in range(self._random.choice([1, 1, 2]))
        ]
        if len(rows) == 2 and {str(rows[0]["entity"])} == {str(rows[1]["entity"])}:
            rows.pop()
        body = {"entries": rows, "validate_only": self._often(0.12)}
        self.steps.append(Step("AlterClientQuotas", self._random.randint(0, 1), body))

    def describe(self) -> None:
        """Draw DescribeClientQuotas with a filter. Entries of other sequences are not compared."""
        random = self._random
        parts: list[Body] = []
        for kind in random.choice(
            [[USER], [CLIENT], [USER, CLIENT], [USER, CLIENT], [], [IP], [USER, IP], [USER, USER]]
        ):
            match = random.choice([EXACT, EXACT, SPECIFIED, DEFAULT])
            part: Body = {
                "entity_type": kind,
                "match_type": match,
                "match": self._name() if match == EXACT else None,
            }
            if self._often(0.04):
                part |= random.choice(
                    [{"match_type": 7}, {"entity_type": "x"}, {"match": None}, {"entity_type": ""}]
                )
            parts.append(part)
        body = {"components": parts, "strict": self._often(0.4)}
        self.steps.append(Step("DescribeClientQuotas", random.randint(0, 1), body))

    def _credential(self) -> Body:
        random = self._random
        return {
            "name": "" if self._often(0.04) else self._name(),
            "mechanism": random.choices([1, 2, 0, 3, 9], [8, 8, 0.5, 0.5, 0.3])[0],
        }

    def alter_users(self) -> None:
        """Draw AlterUserScramCredentials, which may name a user twice."""
        random = self._random
        deletions = [self._credential() for _ in range(random.choice([0, 0, 1, 2]))]
        upsertions = [
            self._credential()
            | {
                "iterations": random.choices([4096, 8192, 4095, 16384, 16385, 0, -1], [10, 4, 1, 1, 1, 1, 1])[
                    0
                ],
                "salt": {"$hex": SALT.hex()},
                "salted_password": {"$salted": "secret"},
            }
            for _ in range(random.choice([0, 1, 1, 2]))
        ]
        if deletions and upsertions and self._often(0.1):
            upsertions[0] |= {"name": deletions[0]["name"], "mechanism": deletions[0]["mechanism"]}
        body = {"deletions": deletions, "upsertions": upsertions}
        self.steps.append(Step("AlterUserScramCredentials", 0, body))

    def describe_users(self) -> None:
        random = self._random
        users: list[Any] = [self._name() for _ in range(random.choice([1, 1, 2, 3]))]
        if self._often(0.05):
            users.append("")
        rows = [{"name": user} for user in users]
        self.steps.append(Step("DescribeUserScramCredentials", 0, {"users": rows}))

    def act(self) -> None:
        """Draw one request."""
        choices = [self.alter, self.describe, self.alter_users, self.describe_users]
        (action,) = self._random.choices(choices, [8, 8, 5, 4])
        action()


def draw(random: Random) -> Sequence:
    """Draw the steps of an administrator who changes quotas and users."""
    quotas = Quotas(random)
    length = random.choice(LENGTHS)
    while len(quotas.steps) < length:
        quotas.act()
    both = [{"entity_type": kind, "match_type": SPECIFIED} for kind in (USER, CLIENT)]
    users = [{"name": name(each)} for each in ("u", "v", "w")]
    observations = (
        *(Step("DescribeClientQuotas", 1, {"components": part}) for part in ([both[0]], [both[1]], both)),
        Step("DescribeUserScramCredentials", 0, {"users": users}),
    )
    return Sequence("quotas", 0, {SENTINEL: {}}, tuple(quotas.steps), observations)


RULES: tuple[Rule, ...] = ()
SUBJECTS = (Subject("quotas", draw, RULES),)
