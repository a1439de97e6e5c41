"""Places in foreign source that the program names are those that were read, and an upgrade is a list of others."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_finetune.foreign.guard import TESTED
from ds_finetune.system.versions import installed_version


def _script() -> Any:
    file = Path(__file__).resolve().parents[2] / "scripts" / "check_citations.py"
    spec = importlib.util.spec_from_file_location("check_citations", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_citations"] = module
    spec.loader.exec_module(module)
    return module


citations = _script()


def test_cited_lines_are_those_of_the_table() -> None:
    """Of the releases of constraints.txt; `scripts/next_versions.sh` lists the places that others have moved."""
    versions = {name: installed_version(name).partition("+")[0] for name in TESTED}
    if others := [name for name, tested in TESTED.items() if versions[name] not in (tested, "")]:
        pytest.skip(f"another release than the tested one of {', '.join(others)}")
    places, wrong = citations.cited_places()
    assert not wrong
    assert len(places) > 200
    assert not list(citations.differences(places, citations.read_table()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("DeepSpeed 0.19.8 (runtime/engine.py:12-14).", [("deepspeed", "runtime/engine.py", "12-14")]),
        ("torch, a/b.py:3, 7-9: why", [("torch", "a/b.py", "3"), ("torch", "a/b.py", "7-9")]),
        ("transformers 5 and x.h:2.", [("transformers", "x.h", "2")]),
        ("FAILED x.cpp:3:10: error, at 10:15, http://host.py:80.5", []),
    ],
)
def test_citations_are_found(text: str, expected: list[tuple[str, str, str]]) -> None:
    assert [found[:3] for found in citations.citations(text)] == expected


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "", []),
        ("def f", "# new\ndef f", ["x.py:1: optuna a.py:3 in `f` is now at 4"]),
        ("return 1", "return 2", ["x.py:1: optuna a.py:3 in `f`: the text has changed"]),
        ("def f", "def g", ["x.py:1: optuna a.py:3 in `f` is now at 3"]),
        ("def f", None, ["x.py:1: optuna a.py:3 in `f`: the file is gone"]),
    ],
    ids=["same", "moved", "changed", "renamed", "gone"],
)
def test_an_upgrade_is_a_list(
    before: str, after: str | None, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package whose file is edited after its place was recorded."""
    source = tmp_path / "a.py"
    source.write_text("def f():\n    x = 0\n    return 1\n")
    monkeypatch.setattr(citations, "_folder", lambda _: tmp_path)
    place = citations.Place("optuna", "a.py", "3")
    _forget()
    table = {place: citations.read_place(place)}
    assert table[place].definition == "f"
    if after is None:
        source.unlink()
    else:
        source.write_text(source.read_text().replace(before, after, 1))
    _forget()
    assert list(citations.differences({place: ["x.py:1"]}, table)) == said
    _forget()


def _forget() -> None:
    for cached in (citations._source, citations._definitions):
        cached.cache_clear()
