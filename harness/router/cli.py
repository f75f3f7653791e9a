"""`harness router list | install | which`: the real router programs at hand. Mounted by harness.cli."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated

import typer

from harness.errors import ComponentError
from harness.router.artifact_cache import cache_root
from harness.router.binaries import RouterBinary, find, obtain, problem_of
from harness.router.releases import Release, load_releases, variable_of

app = typer.Typer(no_args_is_help=True, help="The real llm-d router: what is at hand, and how to get what is not.")

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
ReleaseName = Annotated[str, typer.Argument(metavar="RELEASE", help="e.g. v0.7.1")]
Image = Annotated[
    str | None,
    typer.Option("--image", metavar="REF@sha256:HEX", help="Take it from this image, named by its digest."),
]


@app.command("list")
def list_releases(as_json: AsJson = False) -> None:
    """All releases that the harness knows: which are at hand, and how the others can be had."""
    releases = load_releases()
    rows: list[tuple[Release, RouterBinary | None, str]] = [
        (release, *problem_of(name, releases)) for name, release in releases.known.items()
    ]
    if as_json:
        document = [
            {
                "release": release.name,
                "binary": binary.as_dict() if binary else None,
                "problem": problem or None,
                "ways": ways_of(release),
            }
            for release, binary, problem in rows
        ]
        typer.echo(json.dumps(document, indent=1))
        return
    typer.echo(f"cache: {cache_root()}")
    for release, binary, problem in rows:
        state = typer.style(f"at hand ({binary.how})" if binary else problem or "not at hand", _color(binary, problem))
        facts = [("program", str(binary.path)), ("sha256", binary.sha256)] if binary else []
        _print_block(f"{release.name}: {state}", [*facts, *(("can be had by", way) for way in ways_of(release))])


def _color(binary: RouterBinary | None, problem: str) -> str | None:
    return "green" if binary else "red" if problem else None


def _print_block(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """A line each, whatever the width: paths and digests are there to be copied, so nothing is cut."""
    typer.echo(f"\n{title}")
    before = ""
    for name, value in facts:
        typer.echo(f"  {name if name != before else '':<14} {value}")
        before = name


def ways_of(release: Release) -> list[str]:
    """How a release can be had on any machine, in the order in which the ways are tried."""
    ways = [f"path: router.binary in the experiment, or {variable_of(release.name)}"]
    if release.image:
        ways.append(f"image: {release.image.name} (digest pinned)")
    elif release.image_name:
        ways.append(f"image: {release.image_name}, with a digest from you (--image)")
    if release.module:
        ways.append(f"build: Go module {release.module.module} {release.module.version}")
    return ways


@app.command()
def install(release: ReleaseName, image: Image = None, as_json: AsJson = False) -> None:
    """Get RELEASE into the cache: by image digest, else by building its Go module (some minutes, once)."""

    def progress(line: str) -> None:
        # Standard output carries the result alone.
        typer.echo(f"router {release}: {line}", err=True)

    binary = obtain(release, progress, image=image)
    if as_json:
        typer.echo(json.dumps(binary.as_dict(), indent=1))
        return
    typer.echo(binary.path)
    progress(f"{binary.how}: {binary.source}; sha256 {binary.sha256}")
    if binary.note:
        progress(binary.note)


@app.command()
def which(
    release: Annotated[str | None, typer.Argument(metavar="[RELEASE]", help="Default: all at hand.")] = None,
    as_json: AsJson = False,
) -> None:
    """Where the program of RELEASE is, and what is known of its origin; exit code 3 if it is not at hand."""
    releases = load_releases()
    if release is None:
        found = [binary for name in releases.known if (binary := problem_of(name, releases)[0])]
        if not found and not as_json:
            raise ComponentError("router", "none at hand; try: harness router install", "see harness router list")
    else:
        binary = find(release, releases=releases)
        if binary is None:
            how = "\n".join(ways_of(releases.get(release)))
            raise ComponentError(f"router {release}", f"not at hand; try: harness router install {release}", how)
        found = [binary]
    if as_json:
        records = [binary.as_dict() for binary in found]
        typer.echo(json.dumps(records if release is None else records[0], indent=1))
        return
    if release is not None:
        typer.echo(found[0].path)
        return
    for binary in found:
        known = {True: "yes", False: typer.style("no", "red"), None: "not known"}[binary.unmodified]
        facts = [("how", binary.how), ("program", str(binary.path)), ("sha256", binary.sha256), ("unmodified", known)]
        _print_block(binary.release, [*facts, *([("note", binary.note)] if binary.note else [])])
