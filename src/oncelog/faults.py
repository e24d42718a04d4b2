"""Deprecated name of `oncelog.testing.proxy`, kept for one release."""

from __future__ import annotations

import warnings

from oncelog.testing.proxy import *  # noqa: F403

warnings.warn("oncelog.faults is oncelog.testing.proxy now", DeprecationWarning, stacklevel=2)
