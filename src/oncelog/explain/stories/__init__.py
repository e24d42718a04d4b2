"""Stories: runs of a real producer and broker under chosen faults, with checks of the result."""

from oncelog.explain.stories.catalogue import STORIES, play
from oncelog.explain.stories.environment import StoryEnvironment
from oncelog.explain.stories.story import Story
from oncelog.explain.stories.story_run import Check, Counts, StoryRun

__all__ = ["STORIES", "Check", "Counts", "Story", "StoryEnvironment", "StoryRun", "play"]
