"""The releases of the router that deploy/router/releases.yaml lists, and how the environment names them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.errors import InputError
from harness.router import gobuild, oci

DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "router"


@dataclass(frozen=True, slots=True)
class Release:
    """A release as deploy/router/releases.yaml names it. image: None where no digest is pinned; image_name is
    for messages.
    """

    name: str
    image: oci.Reference | None = None
    image_name: str = ""
    module: gobuild.ModuleBuild | None = None
    commit: str = ""
    tag_object: str = ""


@dataclass(frozen=True, slots=True)
class Releases:
    known: dict[str, Release]
    go_wheel: gobuild.GoWheel

    def get(self, name: str) -> Release:
        """A release that is not listed can still be run from a path or an image that the user gives."""
        return self.known.get(name) or Release(name)


def load_releases(folder: Path = DEPLOY) -> Releases:
    """Read releases.yaml and resolve the folders in it."""
    file = folder / "releases.yaml"
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
        wheel = gobuild.GoWheel(
            raw["go_wheel"]["package"], raw["go_wheel"]["version"], tuple(raw["go_wheel"]["sha256"])
        )
        known = {name: _release(name, entry, folder, str(file)) for name, entry in raw["releases"].items()}
    except OSError as error:
        remedy = "run the harness from a full checkout of the project, which has deploy/router"
        raise InputError(str(file), f"cannot be read ({error.strerror})", remedy) from error
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise InputError(str(file), f"is not a list of releases ({error})", "restore it from the repository") from error
    return Releases(known, wheel)


def _release(name: str, entry: dict[str, Any], folder: Path, where: str) -> Release:
    image, module = entry.get("image"), entry.get("module")
    reference = None
    if image and image["digest"]:
        reference = oci.parse_reference(f"{image['reference']}:{image['tag']}@{image['digest']}", where)
    build = None
    if module:
        build = gobuild.ModuleBuild(
            directory=folder / module["directory"],
            package=module["package"],
            module=module["module"],
            version=module["version"],
            packages=module["packages"],
            note=module["note"].strip(),
        )
    return Release(
        name,
        reference,
        image["reference"] if image else "",
        build,
        entry.get("commit", ""),
        entry.get("tag_object", ""),
    )


def variable_of(release: str) -> str:
    """The environment variable with the path of this release's program: v0.10.0 -> HARNESS_ROUTER_V0100."""
    return "HARNESS_ROUTER_" + re.sub(r"[^A-Z0-9]", "", release.upper())


ANY_RELEASE_VARIABLE = "HARNESS_ROUTER_BINARY"
