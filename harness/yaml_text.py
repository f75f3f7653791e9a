"""YAML as the project reads it: safe, and a key that stands twice in a mapping is an error instead of the last one."""

from __future__ import annotations

from typing import Any

import yaml


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


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


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
