"""The command `oncelog explain`: the list of stories, the drawings and the verdicts."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner

from oncelog.cli.main import cli
from oncelog.explain import stories


def test_the_stories_are_listed() -> None:
    result = CliRunner().invoke(cli, ["explain", "--list"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == list(stories.STORIES)


@pytest.mark.behaviour("I13")
def test_a_story_is_drawn_and_judged(tmp_path: Path) -> None:
    drawing = tmp_path / "lost-ack.svg"
    result = CliRunner().invoke(cli, ["explain", "lost-ack", "--svg", str(drawing)])
    assert result.exit_code == 0, result.output
    assert "The lost acknowledgement" in result.output
    assert "✗◄" in result.output
    assert "answer lost, connection cut" in result.output
    assert "duplicate: already stored at 0" in result.output
    assert "3 sent, 3 acknowledged, 3 stored, 0 lost, 0 doubled" in result.output
    assert result.output.endswith("The story ended as described.\n")
    assert "Produce answer  ok  offset 0" in "".join(ElementTree.parse(drawing).getroot().itertext())


def test_the_events_as_json() -> None:
    result = CliRunner().invoke(cli, ["explain", "all-acked", "-o", "json"])
    assert result.exit_code == 0
    document = json.loads(result.output)
    assert (document["story"], document["as_told"]) == ("all-acked", True)
    (scene,) = document["scenes"]
    sequences = [batch["base_sequence"] for event in scene["events"] for batch in event["batches"]]
    assert sequences == [0, 3, 6, 9, 12]
    assert scene["counts"]["stored"] == 15


def test_an_end_that_is_not_as_told_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    (scene,) = stories.play("all-acked")
    scene.check("the moon is made of cheese", False)
    monkeypatch.setattr(stories, "play", lambda name, servers: [scene])
    result = CliRunner().invoke(cli, ["explain", "all-acked"])
    assert result.exit_code == 1
    assert "✗ the moon is made of cheese" in result.output
    assert result.output.endswith("The story did NOT end as described.\n")


def test_an_unknown_story_is_a_usage_error() -> None:
    result = CliRunner().invoke(cli, ["explain", "lost"])
    assert result.exit_code == 2
    assert "expected one of all-acked" in result.output
