"""The steps that a subject draws, and references in them to values that a broker assigns.

Bodies are plain JSON. A mapping with a `$` key stands for a value that is known when the step is played:

    {"$": "A.epoch", "plus": 1, "else": 7}   a variable (see `Step.binds`), or `else` while it is unbound;
                                             with "floor": 0 the sum is not less
    {"$name": "x"}                           a name of this sequence's own: a group, a transactional id
    {"$topic": "T"}, {"$topic_id": "T"}      a topic of `Sequence.topics`; unknown topics have a fixed id
    {"$batch": {...}}, {"$batches": [...]}   record batches, with the options of oncelog.conform.values
    {"$hex": "00ff"}                         bytes
    {"$text": "x"}, {"$salted": "secret"}    bytes of a text, and of a password salted with `SALT`
    {"$principal": "u"}                      the principal of a user of this sequence's own
    {"$subscription": ["T"]}                 the metadata of a consumer that subscribes to topics
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

Body = dict[str, Any]
RESTARTS = ("restart", "kill")
"""Kinds of steps that restart both brokers: after a clean stop ("restart"), and after SIGKILL ("kill")."""
SENTINEL = "sentinel"
"""The name of an additional topic for sequences that change settings, ACLs or users.

`Run._catch_up` changes a setting of it, to notice when the broker has applied all earlier changes.
"""
PASSWORD, SALT = "secret", b"sixteen bytes!!!"


class Step(NamedTuple):
    """One request, or another event of type `kind`.

    `kind`: "request"; "restart" or "kill" (of the broker); "pause" (`body["ms"]`); "close" (`connection`).
    `binds` maps variables to paths in the response, such as "topics.0.partitions.0.offset". A variable is
    bound if the response has the value and no error. If `is_awaited` is False, the next awaited step of the
    connection reads the response, and the request is not repeated. `passing` has names of errors after which
    the request is repeated. If `parks` is True, the broker may respond only after requests of other clients,
    so the request has its own connection. With `user`, the connection authenticates as this user, whose
    password is `PASSWORD`.
    """

    api: str = ""
    version: int = 0
    body: Body = {}
    connection: str = "main"
    kind: str = "request"
    binds: Mapping[str, str] = {}
    is_awaited: bool = True
    passing: tuple[str, ...] | None = None
    client_id: str = "raw"
    parks: bool = False
    user: str = ""


class Sequence(NamedTuple):
    """Steps, and the observations that are made after the steps.

    `topics` maps each topic's name to its number of partitions and its settings.
    """

    subject: str
    seed: int
    topics: Mapping[str, Mapping[str, Any]]
    steps: tuple[Step, ...]
    observations: tuple[Step, ...] = ()


def restarts_of(sequence: Sequence) -> tuple[str, ...]:
    """Return the kinds of a sequence's restarts, in order."""
    return tuple(step.kind for step in sequence.steps if step.kind in RESTARTS)


class Rule(NamedTuple):
    """Explains differences that are intended or cannot be compared.

    `explains(step, ours, theirs, path)` returns True for such a difference. `key` is the heading of the entry
    in docs/differences.md, or the first words of its bullet. If `ends` is True, the brokers' states differ
    from then on, so the remaining steps are not compared.
    """

    name: str
    reason: str
    explains: Callable[[Step, Any, Any, str], bool]
    key: str | None = None
    ends: bool = False


def answers(api: str, *, ours: str, theirs: str) -> Callable[[Step, Any, Any, str], bool]:
    """Return an `explains` function for requests to which our broker responds with the error `ours`, and
    Kafka with `theirs`.
    """
    return lambda step, our_code, their_code, _: step.api == api and (our_code, their_code) == (ours, theirs)


class Subject(NamedTuple):
    """A generator of sequences. `weight` is the subject's share of a mixed run. A subject with weight 0 runs
    only if it is named.

    A `secured` subject needs brokers with an authorizer and a listener on which clients authenticate.
    """

    name: str
    draw: Callable[[Random], Sequence]
    rules: tuple[Rule, ...] = ()
    weight: int = 1
    secured: bool = False


def ref(variable: str, default: Any, plus: int = 0) -> Body:
    """Return a reference to a variable."""
    return {"$": variable, "plus": plus, "else": default}


def name(text: str) -> Body:
    """Return a reference to a name that no other sequence uses."""
    return {"$name": text}


def topic(text: str) -> Body:
    """Return a reference to the name of a topic."""
    return {"$topic": text}


def topic_id(text: str) -> Body:
    """Return a reference to the id of a topic."""
    return {"$topic_id": text}


def batch(**options: Any) -> Body:
    """Return a reference to a record batch with these options."""
    return {"$batch": options}


def text(value: str) -> Body:
    """Return a reference to the bytes of a text."""
    return {"$text": value}


def principal(user: str) -> Body:
    """Return a reference to the principal of a user that no other sequence has."""
    return {"$principal": user}


def subscription(topics: list[str]) -> Body:
    """Return a reference to the metadata of a consumer that subscribes to these topics."""
    return {"$subscription": topics}
