"""The results of a story's runs as lines of text, and the runs as one drawing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from oncelog.explain.diagram import Note, Step, plan
from oncelog.explain.stories.story import Story
from oncelog.explain.stories.story_run import StoryRun
from oncelog.explain.svg import draw_svg


def verdict_lines(run: StoryRun) -> list[str]:
    """Return lines of text about a run: one with the counts of its records, then one for each check with its
    result.
    """
    rows = dataclasses.asdict(run.counts).items()
    numbers = [f"{value} {name}" for name, value in rows if value or name != "failed"]
    return [
        *(["Records: " + ", ".join(numbers) + "."] if run.is_counted else []),
        *(f"  {'✓' if check.is_true else '✗'} {check.text}" for check in run.checks),
    ]


def draw_story(story: Story, runs: Sequence[StoryRun]) -> str:
    """Return all runs of a story as one SVG document."""
    steps: list[Step] = []
    for run in runs:
        if len(runs) > 1:
            steps.append(Note(run.heading))
        steps += plan(run.events) if run.is_drawn else [Note(verdict_lines(run)[0])]
    lines = [line for run in runs for line in (*run.written, *verdict_lines(run))]
    return draw_svg(steps, story.title, lines if runs[0].is_drawn else [])
