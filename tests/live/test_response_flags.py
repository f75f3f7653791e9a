"""Envoy's response flags in words."""

from __future__ import annotations

import pytest

from harness.live.response_flags import code_of, meanings


def test_every_flag_that_is_explained_is_one_of_envoys() -> None:
    log = pytest.importorskip("envoy.data.accesslog.v3.accesslog_pb2")
    fields = [field.name for field in log.ResponseFlags.DESCRIPTOR.fields]
    codes = [code_of(name) for name in fields]
    assert {"UF", "UH", "URX", "DC", "UC", "UT"} <= set(codes) and len(set(codes)) == len(fields)
    assert len([code for code in codes if code.isupper()]) == 18, "each name of a field in the table is one of Envoy's"


def test_meanings_of_a_log_line() -> None:
    assert meanings("") == {}
    assert list(meanings("UF,URX")) == ["UF", "URX"]
    assert "no connection" in meanings("UF")["UF"]
    assert "Envoy" in meanings("NEW")["NEW"]
