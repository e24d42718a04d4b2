"""The broker's log: one line per event, `key=value` fields, on standard error when serving."""

from __future__ import annotations

import json
import logging
from typing import Any

logger = logging.getLogger("oncelog.broker")
logger.addHandler(logging.NullHandler())

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def log_event(level: str, event: str, *, exc_info: BaseException | None = None, **fields: Any) -> None:
    """Write one event; fields are values that print on one line."""
    number = _LEVELS[level]
    if logger.isEnabledFor(number):
        text = " ".join([f"event={_shown(event)}", *(f"{key}={_shown(v)}" for key, v in fields.items())])
        logger.log(number, text, exc_info=exc_info)


def _shown(value: object) -> str:
    text = str(value)
    # Control characters of a client's names must not reach the terminal that shows the log.
    return text if text.isprintable() and text and not set(' "=') & set(text) else json.dumps(text)


def log_to_stderr(level: str = "info") -> None:
    """For `oncelog serve`: time, level and event on standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("time=%(asctime)s.%(msecs)03d level=%(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    logger.addHandler(handler)
    logger.setLevel(_LEVELS[level])
    logger.propagate = False
