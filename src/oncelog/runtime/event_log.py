"""The log of the broker and of the pipeline supervisor: one line per event with `key=value` fields."""

from __future__ import annotations

import json
import logging
from typing import Any

logger = logging.getLogger("oncelog.broker")
logger.addHandler(logging.NullHandler())

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def log_event(level: str, event: str, *, exc_info: BaseException | None = None, **fields: Any) -> None:
    """Log an event with its fields. `level`: debug, info, warning or error."""
    number = _LEVELS[level]
    if logger.isEnabledFor(number):
        text = " ".join(
            [f"event={_format_value(event)}", *(f"{key}={_format_value(v)}" for key, v in fields.items())]
        )
        logger.log(number, text, exc_info=exc_info)


def _format_value(value: object) -> str:
    text = str(value)
    # Fields may contain names from clients. Quote control characters, which must not reach a terminal.
    return text if text.isprintable() and text and not set(' "=') & set(text) else json.dumps(text)


def log_to_stderr(level: str = "info") -> None:
    """Write events of at least `level`, with time and level, to standard error (as `oncelog serve` does)."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("time=%(asctime)s.%(msecs)03d level=%(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[level])
    logger.propagate = False
