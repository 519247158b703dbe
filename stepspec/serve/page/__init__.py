"""The web page of the service: ask a question, see who wrote each step, and compare the time with the target alone.

`index.html`, `page.css` and `page.js` use only the public API. A content security policy allows only these files and
connections to this service. Text from models is inserted as text.
"""

from collections.abc import Mapping

from fastapi import FastAPI
from fastapi.responses import Response

from stepspec.base.files import package_folder

FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}
"""By path: file and media type."""

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # After an update, the three files must come from the same version.
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add the page and its files to the service. They are not in its OpenAPI document."""
    for path, (name, media_type) in FILES.items():
        _add_file(app, path, (package_folder() / "serve" / "page" / name).read_bytes(), media_type)


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.head(path, include_in_schema=False)
    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)
