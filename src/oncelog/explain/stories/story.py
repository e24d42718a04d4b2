"""A story: its name, title and text, and the function that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oncelog.explain.stories.environment import StoryEnvironment


@dataclass(frozen=True, slots=True)
class Story:
    """A story of `oncelog explain`.

    `title` is one line. `text` is one paragraph about what happens and why. Both are attributes instead of
    docstrings, because `python -OO` removes docstrings.
    """

    name: str
    title: str
    text: str
    run: Callable[[StoryEnvironment], None]


def story(*, name: str, title: str, text: str) -> Callable[[Callable[[StoryEnvironment], None]], Story]:
    """Return a decorator that turns a function into a `Story`."""
    return lambda run: Story(name, title, text, run)
