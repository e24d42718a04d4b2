"""Renders templates into responses with the security headers, and checks the token of forms."""

from __future__ import annotations

import hmac
import secrets
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from oncelog.web import charts
from oncelog.web.display import bytes_text, data_text, duration_text, number_text, page_path, time_text

_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}';"
    " connect-src 'self'; form-action 'self'; frame-ancestors 'none'; img-src data:",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Renderer:
    """The templates and the token of forms. `servers` is the cluster's name on the pages."""

    def __init__(self, servers: str, *, is_read_only: bool) -> None:
        self.is_read_only = is_read_only
        self._servers = servers
        self._token = secrets.token_urlsafe(32)
        self._server_id = secrets.token_urlsafe(8)
        self._templates = Environment(loader=PackageLoader("oncelog.web"), autoescape=True)
        self._templates.filters |= {
            "time": time_text,
            "offset": lambda offset: "–" if offset is None else offset,
            "number": number_text,
            "bytes": bytes_text,
            "duration": duration_text,
            "data": data_text,
        }
        # Each of these functions escapes texts from the cluster.
        for draw in (charts.sparkline, charts.offsets_bar, charts.batch_blocks, charts.transaction_lanes):
            self._templates.globals[draw.__name__] = _marked_safe(draw)
        self._templates.globals |= {"safe_svg": Markup, "page_path": page_path}

    def page(self, template: str, variables: dict[str, Any], status: int = 200) -> HTMLResponse:
        """Return the page of a template, with `variables` and the values that every page needs."""
        nonce = secrets.token_urlsafe(16)
        text = self._templates.get_template(template).render(
            **variables,
            nonce=nonce,
            token=self._token,
            server_id=self._server_id,
            servers=self._servers,
            is_read_only=self.is_read_only,
        )
        headers = {name: value.replace("{nonce}", nonce) for name, value in _SECURITY.items()}
        return HTMLResponse(text, status, headers)

    def refusal(self, error: object, status: int) -> HTMLResponse:
        """Return the error page for a rejected form.

        This page does not refresh itself: its address accepts only POST requests.
        """
        return self.page("error.html", {"error": error, "is_static": True}, status)

    def has_token(self, token: object) -> bool:
        """Return True if a form has the token of these pages."""
        given = str(token).encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self._token.encode())

    async def not_found(self, request: Request, _error: Exception) -> HTMLResponse:
        """Return the response for an unknown address."""
        return self.page("error.html", {"error": f"page {request.url.path} does not exist"}, 404)


def _marked_safe(draw: Any) -> Any:
    return lambda *arguments: Markup(draw(*arguments))
