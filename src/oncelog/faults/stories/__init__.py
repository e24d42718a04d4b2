"""Stories: faults played for real with a producer and a broker, and what came of them."""

from oncelog.faults.stories.catalogue import STORIES, play
from oncelog.faults.stories.scene import Check, Counts, Scene
from oncelog.faults.stories.stage import Stage
from oncelog.faults.stories.story import Story

__all__ = ["STORIES", "Check", "Counts", "Scene", "Stage", "Story", "play"]
