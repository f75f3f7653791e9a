"""docs/experiment.md from the schema's own descriptions: `python -m harness.experiment_docs docs/experiment.md`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from harness.experiment import Experiment

_HEAD = """\
# The experiment file

One YAML file says everything about a run; every run writes it back with all defaults filled in
(`experiment.resolved.yaml`), and running that file again repeats the run to the last byte. Unknown keys are errors.
`--set a.b=value` overrides a field from the command line, `--trace FILE` the trace. `harness schema` prints the JSON
Schema. `harness compare` runs the file's `arms`, or those given by `--arm NAME:a.b=v,c.d=w` (`--arm NAME` picks one of
the file's, `NAME:` is the experiment as it is), over one load; in names of fields a number is an entry of a list
(`l2_adapters.0.capacity_gb`). Relative paths are relative to the file. This page is made from the schema
(`python -m harness.experiment_docs docs/experiment.md`).

```yaml
{example}```
"""


def markdown(example: Path) -> str:
    """The whole page."""
    parts = [_HEAD.format(example=example.read_text(encoding="utf-8")), "\n## Top level\n", *_table(Experiment)]
    for name, field in Experiment.model_fields.items():
        parts.extend(_section(name, _model_of(field.annotation)))
    return "\n".join(parts).rstrip() + "\n"


def _section(path: str, model: type[BaseModel] | None) -> list[str]:
    if model is None:
        return []
    lines = [f"\n## {path}\n", (model.__doc__ or "").strip() + "\n", *_table(model)]
    for name, field in model.model_fields.items():
        lines.extend(_section(f"{path}.{name}", _model_of(field.annotation)))
    return lines


def _table(model: type[BaseModel]) -> list[str]:
    lines = ["| field | default | what it is |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        inner = _model_of(field.annotation)
        text = field.description or (inner.__doc__.strip() if inner and inner.__doc__ else "")
        lines.append(f"| `{name}` | {_default(field, inner)} | {text.replace('|', chr(92) + '|')} |")
    return lines


def _default(field: Any, inner: type[BaseModel] | None) -> str:
    if field.is_required():
        return "required"
    if inner is not None:
        return "see below"
    value = field.default
    return "" if value is PydanticUndefined else f"`{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_of(inner) for inner in getattr(annotation, "__args__", ()))
    return next((model for model in found if model is not None), None)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(markdown(Path(__file__).resolve().parents[1] / "examples" / "compare.yaml"), encoding="utf-8")
