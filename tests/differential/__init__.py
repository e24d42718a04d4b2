"""Differential fuzzing: run random sequences of requests on our broker and on Apache Kafka, and compare the
responses.

A subject of `operations/` draws a `Sequence` of steps from a seed. `runner` runs it on both brokers.
`compare` normalises the responses and finds the first difference. `shrink` drops the steps that the
difference does not need, and `transcript` prints the rest. See
docs/internals/differential-fuzzing.md.
"""
