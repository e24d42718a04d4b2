"""The catalogue of stories, in the order of `oncelog explain --list`."""

from __future__ import annotations

from oncelog.errors import MisuseError
from oncelog.explain.stories import delivery, epochs, flows, restart, transaction_flow
from oncelog.explain.stories.environment import StoryEnvironment
from oncelog.explain.stories.story import Story
from oncelog.explain.stories.story_run import StoryRun

STORIES: dict[str, Story] = {
    story.name: story
    for story in (
        flows.all_acked,
        flows.lost_ack,
        flows.lost_ack_without_idempotence,
        flows.lost_acks,
        flows.lost_batch,
        flows.unordered,
        flows.reorder,
        epochs.cache_miss,
        epochs.stale_epoch,
        epochs.unknown_producer,
        restart.restart,
        epochs.two_sessions,
        epochs.producer_per_record,
        delivery.delivery,
        transaction_flow.transaction,
        transaction_flow.lost_commit,
        transaction_flow.fenced,
        transaction_flow.restarts,
    )
}


def play(name: str, bootstrap_servers: str | None = None) -> list[StoryRun]:
    """Run a story and return its runs.

    If `bootstrap_servers` is None, the story runs on a broker inside this process. Raises MisuseError for an
    unknown name. Raises OncelogError if the story cannot be completed.
    """
    story = STORIES.get(name)
    if story is None:
        raise MisuseError(f"no story {name!r}; there are {', '.join(STORIES)}")
    with StoryEnvironment(bootstrap_servers) as environment:
        story.run(environment)
        return environment.runs
