"""The three delivery semantics under the same faults, counted."""

from __future__ import annotations

import time

from oncelog.explain.stories.flows import NOT_IDEMPOTENT, numbers
from oncelog.explain.stories.scene import PATIENCE_SECONDS, RECORDS_PER_BATCH, Scene
from oncelog.explain.stories.stage import Stage
from oncelog.explain.stories.story import story
from oncelog.testing.proxy.rules import Action, Rule

BATCHES = 60
GROUP = 5 * RECORDS_PER_BATCH
PACE_SECONDS = 0.01
SEED = 11

_AT_MOST_ONCE: dict[str, object] = {"enable.idempotence": "false", "acks": "0", "retries": 0}


def faults() -> list[Rule]:
    """A network that loses one request in ten and one acknowledgement in seven, with their connections."""
    return [
        Rule(action=Action.CUT, api="Produce", direction="request", probability=0.10),
        Rule(action=Action.CUT, api="Produce", direction="response", probability=0.15),
    ]


@story(
    name="delivery",
    title="At most once, at least once, exactly once",
    text=(
        "Sixty batches through a network that loses requests and acknowledgements by chance (one seed for "
        "all), under three configurations."
    ),
)
def delivery(stage: Stage) -> None:
    most = _run(stage, "At most once: acks=0, no retries", _AT_MOST_ONCE)
    most.check("records are lost", most.counts.lost > 0)
    most.check("none is doubled", most.counts.doubled == 0)
    least = _run(stage, "At least once: acks=all, retries, idempotence off", NOT_IDEMPOTENT)
    least.check("none is lost", least.counts.lost == 0)
    least.check("records are doubled", least.counts.doubled > 0)
    exactly = _run(stage, "Exactly once: the defaults, idempotence on", {})
    exactly.check("none is lost", exactly.counts.lost == 0)
    exactly.check("none is doubled", exactly.counts.doubled == 0)
    exactly.check("the log is in the order of sending", exactly.log == list(numbers(BATCHES)))
    exactly.check("every record is acknowledged", exactly.counts.acknowledged == exactly.counts.sent)


def _run(stage: Stage, heading: str, settings: dict[str, object]) -> Scene:
    rules = faults()
    with (
        stage.scene(heading, rules, seed=SEED, is_drawn=False) as scene,
        scene.producer(settings) as producer,
    ):
        for first in range(1, len(numbers(BATCHES)), GROUP):
            scene.send(producer, range(first, first + GROUP))
            # A pace: without acknowledgements everything would be under way when the first fault strikes.
            time.sleep(PACE_SECONDS)
        producer.flush(PATIENCE_SECONDS)
    return scene
