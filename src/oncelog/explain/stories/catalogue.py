"""All stories by name, in the order in which they are listed."""

from __future__ import annotations

from oncelog.errors import MisuseError
from oncelog.explain.stories import delivery, epochs, flows, restart, transaction_flow
from oncelog.explain.stories.scene import Scene
from oncelog.explain.stories.stage import Stage
from oncelog.explain.stories.story import Story

STORIES: dict[str, Story] = {
    story.name: story
    for story in (
        flows.all_acked,
        flows.lost_ack,
        flows.lost_ack_without_idempotence,
        flows.lost_acks,
        flows.lost_batch,
        flows.reorder,
        epochs.cache_miss,
        epochs.stale_epoch,
        epochs.unknown_producer,
        restart.restart,
        epochs.two_sessions,
        delivery.delivery,
        transaction_flow.transaction,
        transaction_flow.lost_commit,
        transaction_flow.fenced,
    )
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
