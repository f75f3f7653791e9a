"""YAML as the project reads it: safe, and a key that stands twice in a mapping is an error instead of the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from harness.errors import InputError


class _UniqueKeys(yaml.SafeLoader):
    """PyYAML's safe loader, which by itself lets the last of equal keys win."""


def _mapping(loader: _UniqueKeys, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[str] = set()
    for key, _ in node.value:
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        name = f"{key.tag} {key.value}"
        if isinstance(key, yaml.ScalarNode) and name in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key.value} stands twice", key.start_mark)
        seen.add(name)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep)


def _sequence(loader: _UniqueKeys, node: yaml.SequenceNode) -> list[Any]:
    """At once, not filled later as PyYAML does: so a list that holds itself is refused."""
    return loader.construct_sequence(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_SEQUENCE_TAG, _sequence)


def parse(text: str) -> Any:
    """The document; yaml.YAMLError (with `problem` and `problem_mark`) for what is not YAML or says a key twice."""
    loader = _UniqueKeys(text)  # a safe loader: plain data only
    try:
        return loader.get_single_data()
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="nested too deeply") from None
    except (ValueError, OverflowError) as error:  # PyYAML's own constructors: the date 2024-13-45, 5000 digits
        raise yaml.MarkedYAMLError(problem=str(error), problem_mark=loader.get_mark()) from None
    finally:
        loader.dispose()


def read(path: Path, remedy: str) -> Any:
    """The file's document. InputError with file, line and problem for what is none, with `remedy` where it cannot be
    read. FileNotFoundError is the caller's, who knows what there is to choose from.
    """
    return read_with_text(path, remedy)[1]


def read_with_text(path: Path, remedy: str) -> tuple[str, Any]:
    """As `read`, with the file's text before the document, for who keeps the file as it is."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, parse(text)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", remedy) from None
    except UnicodeDecodeError as error:
        raise InputError(str(path), f"cannot be read (byte {error.start} is not UTF-8)", remedy) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
        raise InputError(str(path), f"YAML error{line}: {problem}", "correct the file") from None
