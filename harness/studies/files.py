"""Files of studies: found by name or path, read, and checked field by field; what is wrong names file and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from harness import yaml_text
from harness.errors import InputError

Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """Unknown keys are refused, and numbers that are none."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def path_of(name_or_path: str, folder: Path) -> Path:
    """A shipped file of a folder by its name, or a user's own by its path."""
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    return folder / f"{name_or_path}.yaml"


def read_document(path: Path) -> Any:
    """The file's YAML. FileNotFoundError is the caller's, who knows what there is to choose from."""
    return yaml_text.read(path, "give a readable UTF-8 YAML file")


def checked(model: type[Model], document: Any, path: Path, see: str) -> Model:
    """The document as a model; InputError names the first field that is wrong, with `see` as the remedy."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "(the whole file)"
        raise InputError(str(path), f"field {field}: {first['msg']}", see) from None
