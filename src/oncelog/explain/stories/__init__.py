"""Stories: faults played for real with a producer and a broker, and what came of them."""

from oncelog.explain.stories.catalogue import STORIES, play
from oncelog.explain.stories.scene import Check, Counts, Scene
from oncelog.explain.stories.stage import Stage
from oncelog.explain.stories.story import Story

__all__ = ["STORIES", "Check", "Counts", "Scene", "Stage", "Story", "play"]
