"""The `oncelog bench` command: repeatable measurements, with results as JSON, tables and pictures.

A measurement is one module of this package, named in `framework.NAMES`, with

    NAME                      as in `oncelog bench NAME`, bench/results/NAME.json, benchmarks-NAME.svg
    SUMMARY                   one line for --help
    Plan                      frozen dataclass, every field with a default (the committed size); it has a
                              field `repeats` and a property `samples_count`, the number of samples
    QUICK                     a Plan that runs for seconds, for tests
    measure(plan, on_sample)  -> dict made by `framework.result_of`; calls `on_sample(done)` after each sample
    section(result)           -> Markdown: heading, tables, and a sentence computed from the figures
    picture(result)           -> SVG (optional)
    TARGETS                   the targets to reach (optional), read from the result

The framework adds the command, the links, the machine, the page and the table of targets. The sides' samples
are interleaved (`framework.interleaved`). Figures are compared by the median of the pairs' ratios
(`framework.compare`). Load generators run in separate processes (`generators`, `raw_produce`, `raw_fetch`).
"""
