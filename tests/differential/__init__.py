"""Differential fuzzing: random sequences of requests to our broker and to Apache Kafka, whose responses are
compared.

A subject of `operations/` draws a `Sequence` of steps from a seed. `runner` runs it on both brokers.
`compare` normalises the responses and finds the first difference. `shrink` drops the steps that the
difference does not need, and `transcript` prints the rest. See
docs/internals/differential-fuzzing.md.
"""
