"""The page's server: the page, its state, the reports of replays, and switches for trying faults."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, Response

from harness.live.watch import Watch

POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
Switch = Callable[[str, str], None]
"""Told of (component, action); raises KeyError where there is none such."""


def make_page(watch: Watch, results: Path | None = None, switch: Switch | None = None) -> FastAPI:
    """The application. Without `switch` nothing can be stopped or started from the page."""
    app = FastAPI(title="live cluster", docs_url=None, redoc_url=None, openapi_url=None)

    def asset(name: str, kind: str) -> Response:
        text = resources.files("harness.live").joinpath("page", name).read_text(encoding="utf-8")
        return Response(text, media_type=kind, headers={"content-security-policy": POLICY, "cache-control": "no-cache"})

    @app.get("/", response_class=HTMLResponse)
    async def index() -> Response:
        return asset("index.html", "text/html; charset=utf-8")

    @app.get("/live.css")
    async def css() -> Response:
        return asset("live.css", "text/css; charset=utf-8")

    @app.get("/live.js")
    async def script() -> Response:
        return asset("live.js", "text/javascript; charset=utf-8")

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    @app.get("/state")
    async def state() -> Response:
        found = watch.state()
        found["switches"] = switch is not None
        return JSONResponse(found)

    @app.get("/results/{name}/report.html")
    async def report(name: str) -> Response:
        path = (results / name / "report.html").resolve() if results else None
        if path is None or results is None or not path.is_relative_to(results.resolve()) or not path.is_file():
            raise HTTPException(404, "no such report")
        return FileResponse(path, media_type="text/html")

    @app.post("/switch/{component}/{action}")
    def flip(component: str, action: str, request: Request) -> Response:
        # a header of our own: another site's page cannot send it without asking first
        if switch is None or request.headers.get("x-live") != "1":
            raise HTTPException(403, "not from here")
        try:
            switch(component, action)
        except KeyError:
            raise HTTPException(404, f"no {component} to {action}") from None
        return JSONResponse({"done": f"{component} {action}"})

    return app
