"""Prometheus text format, as much as a vLLM server needs: counters, gauges, histograms, cheap to scrape often.

The router scrapes every worker twenty times a second, so a family's text is kept until one of its values changes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = Mapping[str, str]


def label_text(labels: Labels) -> str:
    """Labels as the format writes them, values escaped; empty without labels."""
    if not labels:
        return ""
    parts = (f'{name}="{_escape(value)}"' for name, value in labels.items())
    return "{" + ",".join(parts) + "}"


def number(value: float) -> str:
    """A sample's value."""
    return repr(float(value))


class Series:
    """One value of a counter or gauge."""

    __slots__ = ("_family", "_labels", "value")

    def __init__(self, family: Family, labels: str) -> None:
        self._family, self._labels, self.value = family, labels, 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Count up."""
        if amount:
            self.value += amount
            self._family.text = None

    def set(self, value: float) -> None:
        """A gauge's new value."""
        if value != self.value:
            self.value = value
            self._family.text = None


class Histogram:
    """One histogram of a family; `bounds` ascending, +Inf is added."""

    __slots__ = ("_bounds", "_counts", "_family", "_labels", "sum")

    def __init__(self, family: Family, labels: Labels, bounds: Sequence[float]) -> None:
        self._family, self._bounds = family, [float(b) for b in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self._labels = [label_text({**labels, "le": bound}) for bound in (*map(_bound, self._bounds), "+Inf")]
        self.sum = 0.0

    @property
    def count(self) -> int:
        """How many observations."""
        return sum(self._counts)

    def observe(self, value: float) -> None:
        """One observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value
        self._family.text = None

    def lines(self, name: str, labels: str) -> Iterable[str]:
        """Samples: cumulative buckets, count, sum."""
        total = 0
        for bucket, count in zip(self._labels, self._counts, strict=True):
            total += count
            yield f"{name}_bucket{bucket} {total}.0"
        yield f"{name}_count{labels} {total}.0"
        yield f"{name}_sum{labels} {number(self.sum)}"


class Summary:
    """Count and sum without quantiles."""

    __slots__ = ("_family", "count", "sum")

    def __init__(self, family: Family) -> None:
        self._family, self.count, self.sum = family, 0, 0.0

    def observe(self, value: float) -> None:
        """One observation."""
        self.count += 1
        self.sum += value
        self._family.text = None

    def lines(self, name: str, labels: str) -> Iterable[str]:
        """Samples: count, sum."""
        yield f"{name}_count{labels} {self.count}.0"
        yield f"{name}_sum{labels} {number(self.sum)}"


class Family:
    """One metric with all its label sets. `kind`: counter (samples end in _total), gauge, histogram, summary."""

    def __init__(self, name: str, help_text: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.text: str | None = None
        """Rendered; None: out of date."""
        shown = f"{name}_total" if kind == "counter" else name
        self._head = [f"# HELP {shown} {_escape_help(help_text)}", f"# TYPE {shown} {kind}"]
        self._series: dict[str, Series | Histogram | Summary] = {}
        self._created = time.time()

    def series(self, labels: Labels | None = None) -> Series:
        """The value with these labels, made where there is none."""
        key = label_text(labels or {})
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = Series(self, key)
            self.text = None
        assert isinstance(found, Series)
        return found

    def histogram(self, labels: Labels, bounds: Sequence[float]) -> Histogram:
        """The histogram with these labels, made where there is none."""
        key = label_text(labels)
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = Histogram(self, labels, bounds)
            self.text = None
        assert isinstance(found, Histogram)
        return found

    def summary(self, labels: Labels) -> Summary:
        """The summary with these labels, made where there is none."""
        key = label_text(labels)
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = Summary(self)
            self.text = None
        assert isinstance(found, Summary)
        return found

    def only(self, labels: Labels, value: float) -> None:
        """This label set and no other (an info metric)."""
        self._series.clear()
        self.series(labels).set(value)
        self.text = None

    def render(self) -> str:
        """The family's lines; as vLLM's, with a gauge of the time at which counters and histograms began."""
        if self.text is not None:
            return self.text
        lines = list(self._head)
        name = f"{self.name}_total" if self.kind == "counter" else self.name
        for key, series in self._series.items():
            if isinstance(series, (Histogram, Summary)):
                lines.extend(series.lines(self.name, key))
            else:
                lines.append(f"{name}{key} {number(series.value)}")
        if self.kind != "gauge" and self._series:
            lines.append(f"# HELP {self.name}_created {self._head[0].split(' ', 3)[3]}")
            lines.append(f"# TYPE {self.name}_created gauge")
            lines.extend(f"{self.name}_created{key} {number(self._created)}" for key in self._series)
        self.text = "\n".join(lines) + "\n"
        return self.text


class Registry:
    """Families in the order in which they were declared."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def family(self, name: str, help_text: str, kind: str) -> Family:
        """Declare a family."""
        if name in self._families:
            raise ValueError(f"{name} is declared twice")
        family = self._families[name] = Family(name, help_text, kind)
        return family

    def families(self) -> list[str]:
        """Names of the declared families."""
        return list(self._families)

    def render(self) -> bytes:
        """The whole page."""
        return "".join(family.render() for family in self._families.values()).encode()


def _bound(value: float) -> str:
    return repr(value)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escape_help(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n")
