"""Fixtures of the trace tests."""

from __future__ import annotations
