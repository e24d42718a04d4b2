"""All stories by name. A story's docstring is what is told of it: its title, and how it goes and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from oncelog.errors import MisuseError
from oncelog.faults.stories import delivery, epochs, flows, restart, transactions
from oncelog.faults.stories.scene import Scene
from oncelog.faults.stories.stage import Stage


@dataclass(frozen=True, slots=True)
class Story:
    """A story to play."""

    name: str
    run: Callable[[Stage], None]

    @property
    def title(self) -> str:
        """One line."""
        return (inspect.getdoc(self.run) or "").partition("\n")[0].rstrip(".")

    @property
    def told(self) -> str:
        """How it goes and why, as one paragraph."""
        return " ".join((inspect.getdoc(self.run) or "").partition("\n")[2].split())


STORIES: dict[str, Story] = {
    name: Story(name, run)
    for name, run in {
        "all-acked": flows.all_acked,
        "lost-ack": flows.lost_ack,
        "lost-ack-without-idempotence": flows.lost_ack_without_idempotence,
        "lost-acks": flows.lost_acks,
        "lost-batch": flows.lost_batch,
        "reorder": flows.reorder,
        "cache-miss": epochs.cache_miss,
        "stale-epoch": epochs.stale_epoch,
        "unknown-producer": epochs.unknown_producer,
        "restart": restart.restart,
        "two-sessions": epochs.two_sessions,
        "delivery": delivery.delivery,
        "transaction": transactions.transaction,
        "lost-commit": transactions.lost_commit,
        "fenced": transactions.fenced,
    }.items()
}


def play(name: str, bootstrap_servers: str | None = None) -> list[Scene]:
    """Run a story for real and return its scenes.

    `bootstrap_servers` None: on a broker inside this process. Raises MisuseError for an unknown
    name, OncelogError when the story cannot go on.
    """
    story = STORIES.get(name)
    if story is None:
        raise MisuseError(f"no story {name!r}; there are {', '.join(STORIES)}")
    with Stage(bootstrap_servers) as stage:
        story.run(stage)
        return stage.scenes
