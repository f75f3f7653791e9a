"""What the live cluster needs, from pyproject.toml: printed for pip."""

import tomllib
from pathlib import Path

here = Path("pyproject.toml") if Path("pyproject.toml").is_file() else Path(__file__).parents[1] / "pyproject.toml"
project = tomllib.loads(here.read_text())["project"]
wanted = [*project["dependencies"], *project["optional-dependencies"]["live"]]
print(" ".join(w.split(";")[0].replace(" ", "") for w in wanted))
