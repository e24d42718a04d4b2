"""Scenarios of idempotence and transactions in Markdown, and what runs them on a broker (`oncelog conform`).

`scenario_reader` describes the format. `suite` runs all scenarios; `scenario_run` runs one.
"""
