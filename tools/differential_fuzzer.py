"""Send random sequences of requests to Oncelog's broker and to Apache Kafka, and compare the responses.

    python tools/differential_fuzzer.py --sequences 0..1000 [--subject transactions] [--jobs 4]
    python tools/differential_fuzzer.py --subject transactions --seed 17 [--keep 0,3,5]

A difference that no rule explains is shrunk and printed as a transcript, and the exit code is then 1.
`--ours` and `--kafka` name running brokers, each by its plaintext listener and its SASL listener. The tool
does not restart such brokers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from differential.brokers import apache_broker, oncelog_broker  # noqa: E402
from differential.operations import all_subjects, draw, subject_of  # noqa: E402
from differential.runner import BrokerUnderTest, Fixed, Outcome, Pair, names_of  # noqa: E402
from differential.sequence import Rule, Sequence, Subject  # noqa: E402
from differential.shrink import keep, shrink  # noqa: E402
from differential.transcript import transcript  # noqa: E402


def main() -> int:
    arguments = _arguments()
    subjects = all_subjects()
    chosen = [subjects[text] for text in arguments.subject or sorted(subjects)]
    with ExitStack() as stack:
        pair = Pair(*_brokers(arguments, stack))
        if arguments.seed is not None:
            return _replay(pair, chosen[0], arguments)
        return _search(pair, chosen, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sequences", metavar="A..B", default="0..200")
    parser.add_argument("--seed", type=int, help="run_sequence this sequence and print all of it")
    parser.add_argument(
        "--subject", action="append", help="may be repeated; default: all subjects with a weight"
    )
    parser.add_argument("--keep", metavar="STEPS", help="run_sequence only these steps of --seed")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--max-differences", type=int, default=20)
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no sequence after this time"
    )
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--ours", metavar="HOST:PORT[,HOST:PORT]")
    parser.add_argument("--kafka", metavar="HOST:PORT[,HOST:PORT]")
    return parser.parse_args()


def _brokers(arguments: argparse.Namespace, stack: ExitStack) -> tuple[BrokerUnderTest, BrokerUnderTest]:
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="oncelog-differential-")))
    ours = (
        Fixed(*arguments.ours.split(","))
        if arguments.ours
        else stack.enter_context(oncelog_broker(directory))
    )
    theirs = Fixed(*arguments.kafka.split(",")) if arguments.kafka else stack.enter_context(apache_broker())
    return ours, theirs


def _replay(pair: Pair, subject: Subject, arguments: argparse.Namespace) -> int:
    sequence, kept = draw(subject, arguments.seed), None
    if arguments.keep:
        kept = [int(number) for number in arguments.keep.split(",")]
        sequence = keep(sequence, kept)
    outcome = pair.run_sequence(sequence, subject.rules)
    print(transcript(outcome, kept))
    return int(outcome.difference is not None)


def _drawn(chosen: list[Subject], numbers: range) -> Iterator[tuple[Sequence, tuple[Rule, ...]]]:
    for seed in numbers:
        subject = subject_of(chosen, seed)
        yield draw(subject, seed), subject.rules


def _search(pair: Pair, chosen: list[Subject], arguments: argparse.Namespace) -> int:
    first, last = (int(number) for number in arguments.sequences.split(".."))
    began, played, failed = time.monotonic(), Counter[str](), []
    explained, errors, steps, suspects = Counter[str](), Counter[str](), 0, 0
    rules = {subject.name: subject.rules for subject in chosen}
    for outcome in pair.play_all(_drawn(chosen, range(first, last)), arguments.jobs):
        played[outcome.sequence.subject] += 1
        steps += len(outcome.theirs)
        explained.update({one.rule.name for one in outcome.explained})
        errors.update(names_of(outcome.theirs))
        if outcome.difference is not None:
            suspects += 1
            name, seed = outcome.sequence.subject, outcome.sequence.seed
            again = pair.confirmed(outcome, rules[name])
            print(
                f"difference{'' if again else ' that did not come again'}: subject {name}, seed {seed}",
                flush=True,
            )
            print(transcript(again or outcome).splitlines()[-1], flush=True)
            if again is None:
                continue
            failed.append(again)
        if len(failed) >= arguments.max_differences or time.monotonic() - began > 60 * arguments.minutes:
            break
    seconds = time.monotonic() - began
    for outcome in _one_of_each(failed):
        kept = None
        if not arguments.no_shrink:
            outcome, kept = shrink(outcome, lambda one: pair.run_sequence(one, rules[one.subject]))
        print(transcript(outcome, kept), end="\n\n", flush=True)
    print(f"errors in Kafka's answers: {dict(errors.most_common())}")
    print(f"explained by rules (sequences): {dict(explained.most_common())}")
    print(
        f"{sum(played.values())} sequences, {steps} requests in {seconds:.0f} s "
        f"({dict(played)}): {len(failed)} with differences, "
        f"{suspects - len(failed)} with differences that did not come again",
        flush=True,
    )
    return int(bool(failed))


def _one_of_each(failed: list[Outcome]) -> list[Outcome]:
    """Return the outcome with the shortest sequence for each subject and signature of a difference."""
    best: dict[object, Outcome] = {}
    for outcome in sorted(failed, key=lambda outcome: len(outcome.sequence.steps)):
        assert outcome.difference is not None
        best.setdefault((outcome.sequence.subject, outcome.difference.signature), outcome)
    return list(best.values())


if __name__ == "__main__":
    sys.exit(main())
