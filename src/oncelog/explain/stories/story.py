"""A story: what it is called, what it says, and the function that plays it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oncelog.explain.stories.stage import Stage


@dataclass(frozen=True, slots=True)
class Story:
    """A story to play.

    `title` is one line, `text` one paragraph: how it goes and why. Both are data, for `python -OO` drops
    docstrings.
    """

    name: str
    title: str
    text: str
    run: Callable[[Stage], None]


def story(*, name: str, title: str, text: str) -> Callable[[Callable[[Stage], None]], Story]:
    """Return a decorator that makes the function which plays a story into that `Story`."""
    return lambda run: Story(name, title, text, run)
