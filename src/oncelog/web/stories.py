"""Plays the stories of `oncelog explain`, and keeps the last run of each for its page."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from oncelog.explain.drawing import draw_story
from oncelog.explain.stories import STORIES, Story, play


@dataclass(frozen=True, slots=True)
class PlayedStory:
    """A played story. `svg` is its drawing. `is_as_told` is False if one of its checks failed."""

    svg: str
    is_as_told: bool


class Stories:
    """The stories and their last runs. One story runs at a time, each on a new broker in this process."""

    catalogue: dict[str, Story] = STORIES

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._played: dict[str, PlayedStory] = {}

    def play(self, name: str) -> None:
        """Play a story and keep the result. Raises OncelogError if the story cannot be played to its end."""
        with self._lock:
            runs = play(name)
            is_as_told = all(check.is_true for run in runs for check in run.checks)
            self._played[name] = PlayedStory(draw_story(self.catalogue[name], runs), is_as_told)

    def played(self, name: str) -> PlayedStory | None:
        """Return the last run of a story, or None if it was not played."""
        return self._played.get(name)
