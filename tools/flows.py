"""Draw stories of `oncelog explain` into docs/flows, as text and as SVG: `python tools/flows.py STORY...`.

The stories are played for real. Producer ids become 0, 1, 2, ... in the order of their appearance, and
random names become fixed ones. So the drawings of two runs differ little.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from oncelog.cli.explain import _text
from oncelog.explain.drawing import draw_story
from oncelog.explain.stories import STORIES, StoryRun, play
from oncelog.testing.proxy.events import WireEvent

FLOWS = Path(__file__).resolve().parents[1] / "docs" / "flows"


class Names:
    """Short names for the producer ids, the topic, the transactional ids and the groups of one run."""

    def __init__(self, run: StoryRun) -> None:
        self._topic = run.topic
        self._ids: dict[int, int] = {}

    def id(self, producer_id: int | None) -> int | None:
        """Return the short number for a producer id. None stays None."""
        return None if producer_id is None else self._ids.setdefault(producer_id, len(self._ids))

    def text(self, text: str) -> str:
        """Return the text with short names."""
        text = re.sub(r"\b(transfers|readers)-[0-9a-f]{8}\b", r"\1", text.replace(self._topic, "records"))
        return re.sub(r"\bpid (\d+)", lambda match: f"pid {self.id(int(match[1]))}", text)

    def event(self, event: WireEvent) -> WireEvent:
        """Return the event with short names."""
        txn = event.txn and replace(
            event.txn,
            transactional_id=event.txn.transactional_id and self.text(event.txn.transactional_id),
            producer_id=self.id(event.txn.producer_id),
            group_id=event.txn.group_id and self.text(event.txn.group_id),
            partitions=tuple((self.text(topic), index) for topic, index in event.txn.partitions),
            offsets=tuple((self.text(topic), *place) for topic, *place in event.txn.offsets),
            coordinator_keys=tuple(map(self.text, event.txn.coordinator_keys)),
        )
        return replace(
            event,
            batches=tuple(
                replace(batch, topic=self.text(batch.topic), producer_id=self.id(batch.producer_id))
                for batch in event.batches
            ),
            outcomes=tuple(replace(outcome, topic=self.text(outcome.topic)) for outcome in event.outcomes),
            producer=event.producer and (self._ids_of(event.producer[0]), event.producer[1]),
            txn=txn,
        )

    def _ids_of(self, producer_id: int) -> int:
        # In a response, -1 means that there is no id.
        return producer_id if producer_id < 0 else self._ids.setdefault(producer_id, len(self._ids))


def shorten(runs: Iterable[StoryRun]) -> None:
    """Replace long names and ids by short ones in the events and the stored records of the runs."""
    for run in runs:
        names = Names(run)
        run.events = [names.event(event) for event in run.events]
        run.written = [names.text(line) for line in run.written]


def main() -> None:
    """Draw the stories that are named on the command line."""
    for name in sys.argv[1:]:
        runs = play(name)
        shorten(runs)
        is_as_told = all(check.is_true for run in runs for check in run.checks)
        (FLOWS / f"{name}.txt").write_text(_text(STORIES[name], runs, is_as_told))
        (FLOWS / f"{name}.svg").write_text(draw_story(STORIES[name], runs))
        print(f"{name}: {'as described' if is_as_told else 'NOT as described'}")
        if not is_as_told:
            sys.exit(1)


if __name__ == "__main__":
    main()
