"""Differential fuzzing: random sequences of requests to our broker and to Apache Kafka, answers compared.

A subject of `operations/` draws a `Sequence` of steps from a seed. `runner` plays it on both brokers,
`compare` normalises the answers and finds the first difference, `shrink` drops the steps that it does not
need, and `transcript` prints what is left. How to run it: docs/internals/differential-fuzzing.md.
"""
