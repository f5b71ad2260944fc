"""The page at `/`: a chat, the last minutes as charts, the expert heat map. This module sends the files of its folder.

    index.html, style.css   content and style
    theme.js                light or dark, before the first paint
    main.js                 polls the server once a second and distributes its answers
    api.js                  requests with a key, events out of a stream
    chat.js, answer.js      the conversation; what its log shows
    text.js, store.js       an answer's markdown as elements; conversations kept in the browser
    charts.js, experts.js   small charts; layers × experts

The files are sent without a key (guard.OPEN); the page asks for it when its first request is refused.

No build step and no external files: the policy below lets a browser connect to this server only, and run and show only
these files. The page uses the routes that every client uses, and /debug/stats and /debug/experts.
"""

from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.routing import APIRoute

router = APIRouter()

FOLDER = Path(__file__).parent
MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # a newer server has a newer page
}


def _add(file: Path) -> None:
    """One route for each file, so that no path can lead out of the folder."""

    async def send() -> Response:
        return Response(file.read_bytes(), media_type=f"{MEDIA_TYPES[file.suffix]}; charset=utf-8", headers=HEADERS)

    path = "/" if file.name == "index.html" else f"/page/{file.name}"
    router.add_api_route(path, send, summary="The page", include_in_schema=path == "/")


for _file in sorted(FOLDER.iterdir()):
    if _file.suffix in MEDIA_TYPES:
        _add(_file)

PATHS = frozenset(route.path for route in router.routes if isinstance(route, APIRoute))
"""Of the files, each exactly as requests name it."""
