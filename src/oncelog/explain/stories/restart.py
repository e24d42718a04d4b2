"""The story of a broker that is killed between the append and its acknowledgement."""

from __future__ import annotations

import tempfile
from pathlib import Path

from oncelog.errors import MisuseError
from oncelog.explain.stories.environment import StoryEnvironment
from oncelog.explain.stories.flows import numbers, reported_offsets
from oncelog.explain.stories.story import story
from oncelog.explain.stories.story_run import PATIENCE_SECONDS, StoryRun, has_fate
from oncelog.testing.broker_process import BrokerProcess
from oncelog.testing.proxy.events import Direction, Fate
from oncelog.testing.proxy.rules import Action, Rule


@story(
    name="restart",
    title="kill -9 between store and acknowledgement",
    text=(
        "The broker is killed after it stored a batch, and before its acknowledgement arrived. When "
        "the broker starts again, it rebuilds its producer state from the log, so it recognises the "
        "retry."
    ),
)
def restart(environment: StoryEnvironment) -> None:
    if not environment.is_own_broker:
        raise MisuseError(
            "this story kills its broker, so it needs a broker of its own: leave --bootstrap-server out"
        )
    rule = Rule(action=Action.HOLD, api="Produce", direction="response", nth=2)
    with (
        tempfile.TemporaryDirectory(prefix="oncelog-explain-") as directory,
        BrokerProcess(Path(directory) / "data") as broker,
    ):
        heading = "SIGKILL while the acknowledgement is under way"
        with environment.run(heading, [rule], upstream=broker.bootstrap_servers) as run:
            reported = _play(run, broker)
            sequences, offsets = run.sequences_at_broker(), run.offsets()
            run.check("after the restart, the retry has the same sequences", sequences == [0, 3, 3])
            run.check("the broker recognises the retry and returns the original offset", offsets == [0, 3, 3])
            run.check("the application gets that offset", reported == list(range(6)))
        run.check("the log has every record once, in order", run.log == list(numbers(2)))


def _play(run: StoryRun, broker: BrokerProcess) -> list[int | None]:
    """Send two batches. Kill the broker after it stored the second batch, and lose the acknowledgement.
    Restart it, and return the offsets that the producer reported.
    """
    with run.producer() as producer:
        futures = run.send(producer, range(1, 4))
        producer.flush(PATIENCE_SECONDS)
        futures += run.send(producer, range(4, 7))
        run.wait_until("the second batch to be stored", has_fate(Fate.HELD, Direction.RESPONSE))
        run.proxy.note("the broker is killed with SIGKILL")
        broker.kill()
        run.proxy.release(lose=True)
        broker.start()
        run.proxy.note("the broker has started again and recovered its log")
        producer.flush(PATIENCE_SECONDS)
        return reported_offsets(futures)
