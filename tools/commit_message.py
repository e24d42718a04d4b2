"""Check a commit message. Git runs `commit_message.py FILE` as its commit-msg hook; see CONTRIBUTING.md."""

from __future__ import annotations

import re
import sys
from pathlib import Path

MAX_SUBJECT, MAX_LINE = 72, 100
_SUBJECT = re.compile(r"[a-z][\w /.,-]*: \S")
_DRAFT = re.compile(r"\b(?:wip|fixup!|squash!|tmp)\b|(?:fixup|squash)!", re.IGNORECASE)


def problems(message: str) -> list[str]:
    """Return a sentence for each violation of the style in a message; an empty list if there is none.

    Git's comment lines, which begin with "#", are skipped. The subject that Git makes for a merge or revert
    is accepted.
    """
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines or not lines[0].strip():
        return ["the subject is missing"]
    subject, body = lines[0], lines[1:]
    if subject.startswith(("Merge ", "Revert ")):
        return []
    result = []
    if not _SUBJECT.match(subject):
        result.append(f"the subject is not 'scope: imperative subject': {subject!r}")
    if len(subject) > MAX_SUBJECT:
        result.append(f"the subject has {len(subject)} characters; at most {MAX_SUBJECT} are allowed")
    if subject.endswith("."):
        result.append("the subject ends with a full stop")
    if _DRAFT.search(subject):
        result.append(f"the subject marks a draft: {subject!r}")
    if not body:
        result.append("the body is missing: say why, and with what evidence (figures, seed, test)")
    elif body[0].strip():
        result.append("the second line is not blank")
    result += [f"a line has {len(line)} characters; at most {MAX_LINE} are allowed: {line[:40]!r}..."
               for line in body if len(line) > MAX_LINE and " " in line.strip()]  # fmt: skip
    return result


def main() -> int:
    found = problems(Path(sys.argv[1]).read_text())
    for problem in found:
        print(f"commit message: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
