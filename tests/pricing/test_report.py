"""The generated tables of docs/fidelity.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_workers.errors import InputError
from fake_workers.pricing.registry import profile_names
from fake_workers.pricing.report import generated_parts, insert_parts, main

DOCUMENT = Path(__file__).parents[2] / "docs" / "fidelity.md"


def test_document_shows_the_shipped_profiles() -> None:
    text = DOCUMENT.read_text()
    assert insert_parts(text, generated_parts(), "docs/fidelity.md") == text, (
        "run: python -m fake_workers.pricing.report docs/fidelity.md"
    )


def test_tables_have_one_row_per_profile() -> None:
    for name, part in generated_parts().items():
        lines = part.splitlines()
        if name != "profile-unavailable":
            assert [line.split("|")[1].strip() for line in lines[2:]] == profile_names()
        assert len({line.count("|") for line in lines}) == 1


def test_rewriting_in_place(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- begin profile-errors -->\nold\n<!-- end profile-errors -->\nb\n"
                    "<!-- begin profile-limits -->\n<!-- end profile-limits -->\n"
                    "<!-- begin profile-unavailable -->\n<!-- end profile-unavailable -->\n")  # fmt: skip
    main([str(page)])
    text = page.read_text()
    assert "old" not in text and text.startswith("a\n") and "\nb\n" in text and "glm-5.2-fp8-dp8ep8-b200" in text
    main([str(page)])
    assert page.read_text() == text


def test_missing_markers_are_an_error() -> None:
    with pytest.raises(InputError, match="needs exactly one <!-- begin x -->"):
        insert_parts("nothing here", {"x": "y"}, "page.md")
