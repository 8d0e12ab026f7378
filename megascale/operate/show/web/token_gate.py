"""The gate of the dashboard: without its token every request gets status 403 and nothing else.

The first visit has the token in its URL; the answer moves it into a cookie that only this site sends, and takes it out
of the URL. The token is compared in constant time.
"""

from __future__ import annotations

import hmac

from flask import Flask, Response, redirect, request

MAX_REQUEST_BYTES = 1 << 20  # most bytes of a request's body

HEADERS = {
    # no address but this one: nothing is loaded from elsewhere, and nothing is sent there; the pages are shown in
    # frames of the same origin alone, such as those of a portal whose proxy leads here
    "Content-Security-Policy": "default-src 'self'; script-src 'self' 'unsafe-inline'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "frame-ancestors 'self'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def protect(app: Flask, token: str, cookie: str, base: str) -> None:
    """Let only requests with the token pass. `cookie`: its name, which differs between dashboards of a host. `base`:
    path of the pages for the browser, which sends the cookie nowhere else.
    """
    app.config["MAX_CONTENT_LENGTH"] = MAX_REQUEST_BYTES

    def check() -> Response | None:
        if _equal(request.args.get("token", ""), token):
            answer = redirect(f"{base}{request.path[1:]}")
            answer.set_cookie(cookie, token, path=base, httponly=True, samesite="Strict")
            return answer  # type: ignore[return-value]  # of werkzeug, which Flask takes as well
        if _equal(request.cookies.get(cookie, ""), token):
            return None
        return Response("Forbidden\n", 403, mimetype="text/plain")

    def add_headers(answer: Response) -> Response:
        answer.headers.update(HEADERS)
        return answer

    app.before_request(check)
    app.after_request(add_headers)


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())
