"""Differential fuzzing runs random sequences of requests on our broker and on Apache Kafka, and compares the
responses.

A subject of `operations/` draws a `Sequence` of steps from a seed. `runner` runs it on both brokers.
`compare` normalises the responses and finds the first difference. `shrink` drops the steps that are not
needed to show the difference, and `transcript` prints the remaining ones. See
docs/internals/differential-fuzzing.md.
"""
