"""Placeholders for what vLLM's scheduler imports but never uses: torch, model libraries, servers.

`install()` makes `import torch` (and the other names of ROOTS) succeed with modules whose every attribute is an empty
placeholder class. It must run before the first `import vllm` and in a process of its own. What vLLM's scheduler really
computes with (hashing, msgspec, numpy, zmq) is never replaced.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

ROOTS = """
    torch torchvision torchaudio triton transformers huggingface_hub tokenizers safetensors compressed_tensors
    tiktoken sentencepiece mistral_common PIL cv2 einops numba xgrammar outlines_core llguidance lmformatenforcer
    openai openai_harmony fastapi starlette uvloop aiohttp httpx requests anthropic mcp
    depyf gguf blake3 cpuinfo partial_json_parser opentelemetry prometheus_client pybase64 watchfiles
    pydantic_extra_types setproctitle tqdm urllib3
"""

_ROOTS = frozenset(ROOTS.split())

MODEL_EXECUTION = ("vllm.ir", "vllm.v1.executor", "vllm.v1.worker")
"""vLLM's own packages that run the model; the engine loop imports them and a fake executor takes their place."""


class _Placeholder(type):
    """A class that stands for anything: base class, decorator, type annotation, flag, constant."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], type):
            return args[0]  # used as a decorator
        return object.__new__(cls)  # type: ignore[arg-type]

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def __hash__(cls) -> int:
        return id(cls)

    def __lt__(cls, other: Any) -> bool:
        return False

    def __le__(cls, other: Any) -> bool:
        return True

    def __gt__(cls, other: Any) -> bool:
        return False

    def __ge__(cls, other: Any) -> bool:
        return True


class _Base:
    """What instances of placeholders can do: nothing, without complaint."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _make(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: object) -> None:
        """Exceptions pass."""


def _make(name: str) -> Any:
    return _Placeholder(name, (_Base,), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "2.13.0"
        if name.startswith("__"):
            raise AttributeError(name)
        value = _make(name)
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in _ROOTS or fullname.startswith(MODEL_EXECUTION):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """A placeholder has no body."""


def install() -> None:
    """Put the placeholders in place of the real modules for the rest of this process."""
    sys.meta_path.insert(0, _Finder())
    import torch.library

    torch.library.infer_schema = lambda *args, **kwargs: ""
