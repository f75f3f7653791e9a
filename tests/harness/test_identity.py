"""Which harness made a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import identity


def test_the_code_s_digest_is_of_what_decides_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("studies", "__pycache__", "cache"):
        (tmp_path / "harness" / name).mkdir(parents=True)
    monkeypatch.setattr(identity, "_ROOTS", (tmp_path / "harness",))
    monkeypatch.setattr(identity, "_DECIDE_NOTHING", tmp_path / "harness" / "studies")

    def digest_with(name: str, text: str) -> str:
        (tmp_path / "harness" / name).write_text(text)
        return identity.harness_code.__wrapped__()

    one = digest_with("cache/tier.py", "a = 1\n")
    assert len(one) == 12
    assert digest_with("studies/finding.py", "x") == digest_with("__pycache__/tier.pyc", "x") == one
    assert digest_with("cache/tier.py", "a = 2\n") != one
    assert digest_with("cache/tier.py", "a = 1\n") == one
    assert digest_with("cache/profile.npz", "") != one


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert identity.package_version("no-such-package-here") == "not installed"
    assert identity.package_version("numpy")[0].isdigit()
