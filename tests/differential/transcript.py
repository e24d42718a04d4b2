"""Print an outcome as text: the requests, and both responses where they differ."""

from __future__ import annotations

import json
from typing import Any

from differential.compare import differing
from differential.runner import Outcome
from differential.sequence import Step

MAX_CHARACTERS = 1500


def transcript(outcome: Outcome, kept: list[int] | None = None) -> str:
    """Return the steps up to the first difference, and the difference."""
    sequence, difference = outcome.sequence, outcome.difference
    title = f"subject {sequence.subject}, seed {sequence.seed}"
    if kept is not None:
        title += f", steps kept: {','.join(map(str, kept))}"
    lines = [title, f"topics {_compact(sequence.topics)}"]
    steps = [*sequence.steps, *sequence.observations]
    last = len(steps) - 1 if difference is None else difference.number
    for number, step in enumerate(steps[: last + 1]):
        lines.append(f"{number:3} {_request(step)}")
        ours, theirs = outcome.ours[number], outcome.theirs[number]
        if ours == theirs:
            lines.append(f"      both  {_compact(ours)}")
        else:
            lines += [f"      ours  {_compact(ours)}", f"      Kafka {_compact(theirs)}"]
            lines += [
                f"      {path or 'answer'}: ours {_compact(one)}, Kafka {_compact(other)}"
                for path, one, other in differing(ours, theirs)
            ]
    if difference is None:
        lines.append("no difference")
    return "\n".join(lines)


def _request(step: Step) -> str:
    if step.kind != "request":
        return f"{step.kind} {_compact(step.body) if step.body else ''}".rstrip()
    more = "" if step.connection == "main" else f" on {step.connection}"
    more += "" if step.is_awaited else " (not awaited)"
    more += f" binds {_compact(step.binds)}" if step.binds else ""
    return f"{step.api} {step.version}{more} {_compact(step.body)}"


def _compact(value: Any) -> str:
    text = json.dumps(value, default=str).replace('"', "")
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}..."
