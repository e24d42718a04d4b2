"""The console's fault proxy: the events that its page shows, and the faults that it offers."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace

from oncelog.explain.diagram import DRAWN_APIS, Arrow, Step, Tone, plan
from oncelog.explain.svg import draw_svg
from oncelog.testing.proxy.events import Direction, Fate, WireEvent
from oncelog.testing.proxy.proxy import Proxy

MAX_EVENTS = 1_000
"""The maximum number of kept events. A repeated batch is recognised only if its first request is kept."""
MAX_PARTITIONS = 50_000
"""The maximum number of batches and outcomes in the kept events. One request may have thousands."""
DRAWN_STEPS = 24
MAX_TEXT = 60
PRESETS = {
    "response Produce cut count=1": "Lose the next acknowledgement",
    "request Produce cut count=1": "Lose the next batch",
    "request Produce duplicate count=1": "Send the next batch twice",
    "request Produce hold count=1 release_after=1": "Let the next batch be overtaken",
    "Produce fail error=NOT_ENOUGH_REPLICAS count=1": "Refuse the next batch",
    "response Produce delay delay_ms=300": "Delay acknowledgements by 300 ms",
    "response Produce cut probability=0.1": "Lose a tenth of the acknowledgements",
    "response EndTxn cut count=1": "Lose the response to the next commit or abort",
}
"""The faults that the page offers, and what each of them does."""


class FaultProxy:
    """A proxy in front of the cluster, and the newest messages of producers that passed through it."""

    def __init__(self, upstream: str, host: str, port: int) -> None:
        self._lock = threading.Lock()
        self._events: deque[WireEvent] = deque()
        self._partition_count = 0
        """Number of batches and outcomes in `_events`."""
        self.proxy = Proxy(upstream, host=host, port=port, on_event=self._keep, max_events=1)

    def _keep(self, event: WireEvent) -> None:
        # Leave out other forwarded messages: fetches and heartbeats would soon replace those that the page
        # is about.
        if event.api in DRAWN_APIS or event.direction is Direction.NOTE or event.fate is not Fate.PASSED:
            with self._lock:
                self._append(event)

    def _append(self, event: WireEvent) -> None:
        """Keep an event, and drop the oldest ones beyond the limits."""
        self._events.append(event)
        self._partition_count += len(event.partitions)
        # Limit the batches too, because each load of the page examines all kept batches. See
        # test_large_requests_replace_older_ones.
        while len(self._events) > MAX_EVENTS or self._partition_count > MAX_PARTITIONS:
            self._partition_count -= len(self._events.popleft().partitions)

    def steps(self) -> list[Step]:
        """Return the arrows and notes of the kept events, in order."""
        with self._lock:
            events = list(self._events)
        return plan(events)


def draw_newest(steps: Sequence[Step]) -> str:
    """Return an SVG document with the newest steps. Texts are cut: a request may have many batches."""
    drawn = [
        replace(step, text=_cut(step.text), remark=_cut(step.remark)) if isinstance(step, Arrow) else step
        for step in steps[-DRAWN_STEPS:]
    ]
    return draw_svg(drawn, "The newest messages of producers")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def count_decisions(steps: Sequence[Step]) -> Counter[Tone]:
    """Return the number of batches by the broker's decision, and the number of lost messages as Tone.LOST."""
    arrows = [step for step in steps if isinstance(step, Arrow)]
    decisions = Counter(decision for arrow in arrows for decision in arrow.decisions)
    decisions[Tone.LOST] = sum(arrow.tone is Tone.LOST for arrow in arrows)
    return decisions
