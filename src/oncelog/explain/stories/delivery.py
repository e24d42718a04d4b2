"""The story of the three delivery semantics: each runs under the same faults, and the records are counted."""

from __future__ import annotations

import time

from oncelog.explain.stories.environment import StoryEnvironment
from oncelog.explain.stories.flows import NOT_IDEMPOTENT, numbers
from oncelog.explain.stories.story import story
from oncelog.explain.stories.story_run import PATIENCE_SECONDS, RECORDS_PER_BATCH, StoryRun
from oncelog.testing.proxy.rules import Action, Rule

BATCHES = 60
GROUP = 5 * RECORDS_PER_BATCH
PACE_SECONDS = 0.01
SEED = 11

_AT_MOST_ONCE: dict[str, object] = {"enable.idempotence": "false", "acks": "0", "retries": 0}


def faults() -> list[Rule]:
    """Return rules that cut the connection at 10 % of the Produce requests and 15 % of their responses."""
    return [
        Rule(action=Action.CUT, api="Produce", direction="request", probability=0.10),
        Rule(action=Action.CUT, api="Produce", direction="response", probability=0.15),
    ]


@story(
    name="delivery",
    title="At most once, at least once, exactly once",
    text=(
        "Sixty batches are sent with each of three configurations. The network loses requests and "
        "acknowledgements at random, with the same seed each time."
    ),
)
def delivery(environment: StoryEnvironment) -> None:
    most = _run(environment, "At most once: acks=0, no retries", _AT_MOST_ONCE)
    most.check("records are lost", most.counts.lost > 0)
    most.check("no record is doubled", most.counts.doubled == 0)
    least = _run(environment, "At least once: acks=all, retries, idempotence off", NOT_IDEMPOTENT)
    least.check("no record is lost", least.counts.lost == 0)
    least.check("records are doubled", least.counts.doubled > 0)
    exactly = _run(environment, "Exactly once: the defaults, idempotence on", {})
    exactly.check("no record is lost", exactly.counts.lost == 0)
    exactly.check("no record is doubled", exactly.counts.doubled == 0)
    exactly.check("the log is in the order of sending", exactly.log == list(numbers(BATCHES)))
    exactly.check("every record is acknowledged", exactly.counts.acknowledged == exactly.counts.sent)


def _run(environment: StoryEnvironment, heading: str, settings: dict[str, object]) -> StoryRun:
    rules = faults()
    with (
        environment.run(heading, rules, seed=SEED, is_drawn=False) as run,
        run.producer(settings) as producer,
    ):
        for first in range(1, len(numbers(BATCHES)), GROUP):
            run.send(producer, range(first, first + GROUP))
            # Pause between groups. With acks=0, the producer would otherwise send everything before the first
            # fault.
            time.sleep(PACE_SECONDS)
        producer.flush(PATIENCE_SECONDS)
    return run
