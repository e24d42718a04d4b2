"""Scenarios of idempotence and transactions in Markdown, and the code of `oncelog conform` that runs them.

`scenario_reader` describes the format. `suite` runs all scenarios; `scenario_run` runs one.
"""
