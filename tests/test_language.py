"""Plain English as failing tests: docstrings, comments and documents, as far as a program can check them.

`python tests/test_language.py PATH...` lists what it finds in these files and folders.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

HEADLESS = re.compile(r"^(?:Who|Whom|Whose|What|Whether|When|Where|Which|How)\b[^?]*$", re.DOTALL)
"""Matches a sentence that is only a subordinate clause, such as "Whether the log alone decides."."""
BANNED = re.compile(
    r"\b(?:anew|amid|for ever|so many|so much|whoever|all the same|at rest|has its turn|nobody in particular"
    r"|is told|are told|is to be|are to be|goes on|go on|from now on it|as it were|of its own accord)\b",
    re.IGNORECASE,
)
ROW = re.compile(r"\brows? [A-Z]\d{1,3}\b")
BARE_ERROR = re.compile(
    r"(?<!exit )\b(?:error|code|answers?|answered|refused with) (?:code )?\d{1,3}\b(?! ?(?:ms|s|bytes|%))",
    re.IGNORECASE,
)
REPOSITORY_PATH = re.compile(
    r"(?<![\w/.-])((?:docs|src|tests|tools|packages|examples)/[\w./-]*\w\.(?:py|md|toml|txt|pml|sh))"
)
STRING_OR_COMMENT = re.compile(
    r"""\"\"\"(?:\\.|[^\\])*?\"\"\"|\'\'\'(?:\\.|[^\\])*?\'\'\'"""
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\#[^\n]*""",
    re.DOTALL,
)
MAX_WORDS_IN_CODE, MAX_WORDS_IN_DOCS = 30, 35

CLEAN = (ROOT / "tests" / "plain_english.txt").read_text().split()
"""Files and folders that somebody read sentence by sentence. A test keeps violations of the rules out of
them.
"""


class Violation(NamedTuple):
    line: int
    rule: str
    text: str


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of prose, without tables, headings and code blocks."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+", text):
        lines = [line.strip() for line in paragraph.splitlines()]
        if any(line.startswith(("|", ">>>", "#")) for line in lines) or paragraph.startswith(("    ", "\t")):
            continue
        joined = " ".join(lines).strip()
        yield from (part.strip() for part in re.split(r"(?<=[.!?])\s+(?=[A-Z`\"(*])", joined) if part.strip())


def check_prose(text: str, line: int, max_words: int) -> Iterator[Violation]:
    """Yield the violations in one docstring, comment or document that begins at `line`."""
    for sentence in sentences(text):
        if HEADLESS.match(sentence) and not sentence.endswith(":"):
            yield Violation(line, "headless sentence", sentence)
        if len(sentence.split()) > max_words:
            yield Violation(line, f"more than {max_words} words", sentence)
    for rule, pattern in (
        ("banned phrase", BANNED),
        ("row instead of behaviour", ROW),
        ("bare error number", BARE_ERROR),
    ):
        for match in pattern.finditer(text):
            yield Violation(line + text.count("\n", 0, match.start()), rule, match.group())
    for match in REPOSITORY_PATH.finditer(text):
        if not (ROOT / match.group(1)).exists():
            yield Violation(line + text.count("\n", 0, match.start()), "no such file", match.group(1))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment. `tokenize` finds the same, but takes many times as long."""
    line, position = 1, 0
    for match in STRING_OR_COMMENT.finditer(source):
        if match.group().startswith("#"):
            line += source.count("\n", position, match.start())
            position = match.start()
            yield line, match.group()


def _docstrings(tree: ast.AST) -> Iterator[Any]:
    """Yield the statements that are only a string and are in the body of something.

    Only statements are searched, which are a tenth of all nodes.
    """
    parents = [tree]
    while parents:
        parent = parents.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            children = getattr(parent, name, ())
            for child in children if isinstance(children, list) else ():
                parents.append(child)
                match child:
                    case ast.Expr(value=ast.Constant(value=str())) if name == "body":
                        yield child


def check_code(source: str) -> Iterator[Violation]:
    """Yield what the rules find in the docstrings and comments of Python source."""
    for statement in _docstrings(ast.parse(source)):
        yield from check_prose(statement.value.value, statement.lineno, MAX_WORDS_IN_CODE)
    block: list[str] = []
    start = previous = 0
    for line, comment in comments(source):
        if re.match(r"#\s*(?:noqa|type:|fmt:|!)", comment):
            continue
        if line != previous + 1 and block:
            yield from check_prose("\n".join(block), start, MAX_WORDS_IN_CODE)
            block = []
        if not block:
            start = line
        previous = line
        block.append(comment.lstrip("# "))
    if block:
        yield from check_prose("\n".join(block), start, MAX_WORDS_IN_CODE)


def check_file(path: Path) -> list[Violation]:
    """Return the violations in a Python file or a document."""
    text = path.read_text()
    found = check_code(text) if path.suffix == ".py" else check_prose(text, 1, MAX_WORDS_IN_DOCS)
    return sorted(found)


def files_under(name: str) -> list[Path]:
    path = ROOT / name
    return (
        sorted(file for file in path.rglob("*") if file.suffix in (".py", ".md")) if path.is_dir() else [path]
    )


@pytest.mark.parametrize("name", CLEAN)
def test_files_that_were_read_stay_plain(name: str) -> None:
    assert not [
        f"{file.relative_to(ROOT)}:{v.line}: {v.rule}: {v.text}"
        for file in files_under(name)
        for v in check_file(file)
    ]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Whether the log alone decides.", "headless sentence"),
        ("Return it.\n\nWho comes again finds nothing.", "headless sentence"),
        ("It is written anew.", "banned phrase"),
        ("See row I7.", "row instead of behaviour"),
        ("Answers error 24 for an empty name.", "bare error number"),
        ("See docs/no-such-page.md.", "no such file"),
        ("word " * 40, "more than 30 words"),
    ],
)
def test_each_rule_finds_its_example(text: str, rule: str) -> None:
    assert rule in {violation.rule for violation in check_prose(text, 1, 30)}


@pytest.mark.parametrize(
    "text",
    [
        "When does a batch leave?",
        "Return True if the log alone decides.",
        "See docs/behaviours.md.",
        "It takes 24 ms.",
        "It ends with exit code 3.",
    ],
)
def test_plain_sentences_pass(text: str) -> None:
    assert not list(check_prose(text, 1, 30))


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for file in files_under(argument):
            for violation in check_file(file):
                print(f"{file.relative_to(ROOT)}:{violation.line}: {violation.rule}: {violation.text[:160]}")
