"""docs/reference/layout-choices.md has the choices of the search."""

import runpy

import pytest

from tests.conftest import ROOT

SCRIPT = runpy.run_path(str(ROOT / "scripts" / "layout_choices.py"))


def test_every_run_file_has_rows() -> None:
    runs = {path.stem for path in (ROOT / "ds_configs" / "runs").glob("*.yaml")}
    assert set(SCRIPT["MODELS"]) == runs
    text = SCRIPT["PAGE"].read_text(encoding="utf-8")
    assert [f"\n| `{name}`, " in text for name in SCRIPT["MODELS"]] == [True] * len(runs)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPT["MODELS"])
def test_the_page_is_what_the_search_chooses(name: str) -> None:
    assert "".join(SCRIPT["section"](name)) in SCRIPT["PAGE"].read_text(encoding="utf-8")
