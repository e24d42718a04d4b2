"""`oncelog explain STORY`: play a fault story for real and draw what crossed the wire."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oncelog.cli.common import environment_servers

if TYPE_CHECKING:
    from oncelog.explain.stories import Story, StoryRun

EXIT_NOT_AS_TOLD = 1


def _list_stories(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if not value:
        return
    from oncelog.explain.stories import STORIES

    width = max(map(len, STORIES))
    for name, story in STORIES.items():
        click.echo(f"{name:<{width}}  {story.title}")
    context.exit()


@click.command("explain")
@click.argument("name", metavar="STORY")
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list_stories,
    help="List the stories and exit.",
)  # fmt: skip
@click.option(
    "-b", "--bootstrap-server", default=environment_servers, metavar="HOST:PORT",
    help="Play on this cluster (it may be Apache Kafka). ONCELOG_BOOTSTRAP_SERVERS sets it too.  "
    "[default: a new broker in this process]",
)  # fmt: skip
@click.option(
    "--svg", type=click.Path(dir_okay=False, path_type=Path), help="Also write the drawing to this file."
)
@click.option(
    "-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True,
    help="Format on standard output.",
)  # fmt: skip
@click.pass_context
def command(
    context: click.Context, name: str, bootstrap_server: str | None, svg: Path | None, output: str
) -> None:
    """Play STORY for real and draw what crossed the wire.

    A producer sends records through a network that loses, delays or repeats chosen messages. Then the log is
    read and its records are counted. Exit code 1: the story ended differently than described.

    \b
    Examples:
      oncelog explain --list
      oncelog explain lost-ack
      oncelog explain reorder --svg reorder.svg
      oncelog explain delivery -b kafka:9092
    """
    from oncelog.explain.stories import STORIES, play

    if name not in STORIES:
        raise click.BadParameter(f"{name!r}: expected one of {', '.join(STORIES)}", param_hint="STORY")
    story = STORIES[name]
    scenes = play(name, bootstrap_server)
    is_as_told = all(check.is_true for scene in scenes for check in scene.checks)
    if output == "json":
        click.echo(json.dumps(_document(story, scenes, is_as_told), indent=2))
    else:
        click.echo(_text(story, scenes, is_as_told), nl=False)
    if svg is not None:
        from oncelog.explain.drawing import draw_story

        svg.write_text(draw_story(story, scenes))
    context.exit(0 if is_as_told else EXIT_NOT_AS_TOLD)


def _document(story: Story, scenes: Sequence[StoryRun], is_as_told: bool) -> dict[str, Any]:
    return {
        "story": story.name,
        "title": story.title,
        "told": story.text,
        "as_told": is_as_told,
        "scenes": [
            {
                "heading": scene.heading,
                "counts": dataclasses.asdict(scene.counts),
                "written": scene.written,
                "checks": [dataclasses.asdict(check) for check in scene.checks],
                "events": [event.to_dict() for event in scene.events],
            }
            for scene in scenes
        ],
    }


def _text(story: Story, scenes: Sequence[StoryRun], is_as_told: bool) -> str:
    from oncelog.explain.diagram import hidden_apis, plan
    from oncelog.explain.drawing import verdict_lines
    from oncelog.explain.text import draw_text

    parts = [story.title, "═" * len(story.title), *textwrap.wrap(story.text, 96), ""]
    for scene in scenes:
        parts += [scene.heading, "─" * len(scene.heading), ""]
        if scene.is_drawn:
            parts.append(draw_text(plan(scene.events)))
            hidden = ", ".join(f"{count} {api}" for api, count in hidden_apis(scene.events).items())
            parts += [f"Not drawn: {hidden}.", ""] if hidden else []
        if scene.written:
            parts += ["In the logs:", *(f"  {line}" for line in scene.written), ""]
        parts += [*verdict_lines(scene), ""]
    parts.append("The story ended as described." if is_as_told else "The story did NOT end as described.")
    return "\n".join(parts) + "\n"
