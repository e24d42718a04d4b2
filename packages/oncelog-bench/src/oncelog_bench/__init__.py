"""`oncelog bench`: measurements that one command repeats, as JSON, tables and pictures.

A measurement is one module here, named in `framework.NAMES`, with

    NAME                      as in `oncelog bench NAME`, bench/results/NAME.json, benchmarks-NAME.svg
    SUMMARY                   one line for --help
    Plan                      frozen dataclass, every field with a default (the committed size); `repeats`
                              among them, and a property `samples_count`, how many samples it will take
    QUICK                     a Plan of seconds, for tests
    measure(plan, on_sample)  -> dict made by `framework.result_of`; calls `on_sample(done)` after each
    section(result)           -> Markdown: heading, tables, and a sentence computed from the figures
    picture(result)           -> SVG (optional)
    TARGETS                   what it must reach (optional), read from the result

The framework adds the command, the links, the machine, the page and the table of targets. Samples are
interleaved A B A B (`framework.interleaved`), figures compared by the median of the pairs' ratios
(`framework.compare`), generators run as processes of their own (`generators`, `raw_produce`, `raw_fetch`).
"""
