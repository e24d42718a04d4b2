"""A broker killed between storing and acknowledging."""

from __future__ import annotations

import tempfile
from pathlib import Path

from oncelog.errors import MisuseError
from oncelog.explain.stories.flows import numbers, offsets_told
from oncelog.explain.stories.scene import PATIENCE_SECONDS, Scene, fate_seen
from oncelog.explain.stories.stage import Stage
from oncelog.explain.stories.story import story
from oncelog.testing.broker_process import ServedBroker
from oncelog.testing.proxy.events import Direction, Fate
from oncelog.testing.proxy.rules import Action, Rule


@story(
    name="restart",
    title="kill -9 between store and acknowledgement",
    text=(
        "The broker is killed after it stored a batch and before its acknowledgement arrived. It rebuilds "
        "what it knows of producers from its log, so the retry is recognised after the restart."
    ),
)
def restart(stage: Stage) -> None:
    if not stage.is_own_broker:
        raise MisuseError(
            "this story kills its broker, so it runs on its own only: leave --bootstrap-server out"
        )
    rule = Rule(action=Action.HOLD, api="Produce", direction="response", nth=2)
    with (
        tempfile.TemporaryDirectory(prefix="oncelog-explain-") as directory,
        ServedBroker(Path(directory) / "data") as broker,
    ):
        heading = "SIGKILL while the acknowledgement is under way"
        with stage.scene(heading, [rule], upstream=broker.bootstrap_servers) as scene:
            told = _play(scene, broker)
            sequences, offsets = scene.sequences_at_broker(), scene.offsets()
            scene.check("the retry crosses the restart with the same sequences", sequences == [0, 3, 3])
            scene.check("it is recognised and told its original offset", offsets == [0, 3, 3])
            scene.check("the application is told that offset", told == list(range(6)))
        scene.check("the log holds every record once, in order", scene.log == list(numbers(2)))


def _play(scene: Scene, broker: ServedBroker) -> list[int | None]:
    """Send two batches, kill the broker before the second is acknowledged; the offsets told."""
    with scene.producer() as producer:
        futures = scene.send(producer, range(1, 4))
        producer.flush(PATIENCE_SECONDS)
        futures += scene.send(producer, range(4, 7))
        scene.wait_until("the second batch to be stored", fate_seen(Fate.HELD, Direction.RESPONSE))
        scene.proxy.note("the broker is killed with SIGKILL")
        broker.kill()
        scene.proxy.release(lose=True)
        broker.start()
        scene.proxy.note("the broker has started again and recovered its log")
        producer.flush(PATIENCE_SECONDS)
        return offsets_told(futures)
