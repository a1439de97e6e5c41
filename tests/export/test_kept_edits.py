"""What a user has written into an export is kept when a longer training replaces it."""

import json
from pathlib import Path

import pytest

from ds_finetune.errors import OutputError
from ds_finetune.export.file_record import write_file_record
from ds_finetune.export.kept_edits import MARK, kept_edits, marked_card
from ds_finetune.export.output_folder import RECORD, replaced_folder


def _export(out: Path, step: int, said: list[str]) -> None:
    with kept_edits(out, said.append), replaced_folder(out) as partial:
        (partial / "model.safetensors").write_text(str(step))
        (partial / "model.safetensors.index.json").write_text(str(step))
        (partial / "generation_config.json").write_text("{}")
        (partial / RECORD).write_text(json.dumps({"step": step}))
    (out / "README.md").write_text(marked_card(f"{MARK} 1 -->\n{step}"))


def test_an_export_without_edits_is_replaced(tmp_path: Path) -> None:
    said: list[str] = []
    for step in (1, 2):
        _export(tmp_path / "export", step, said)
    assert said == []
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (tmp_path / "export" / "model.safetensors").read_text() == "2"


def test_added_and_changed_files_are_kept_each_time(tmp_path: Path) -> None:
    out, said = tmp_path / "export", list[str]()
    edits = {"README.md": "my card", "notes/day 1.txt": "mine", "generation_config.json": '{"top_k": 5}', "m.gguf": "g"}
    for step in (1, 2, 3):
        _export(out, step, said)
        for name, text in edits.items():
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text(text)
    assert [line.partition(" are in ")[2] for line in said] == [
        f"{tmp_path / name}: README.md, generation_config.json, m.gguf, notes/day 1.txt"
        for name in ("export-edits", "export-edits-2")
    ]
    card = marked_card(f"{MARK} 1 -->\n3")
    (out / "README.md").write_text(f"{card}\nLicence: mine")
    _export(out, 4, said)
    assert (tmp_path / "export-edits-3" / "README.md").read_text() == f"{card}\nLicence: mine"
    for folder in ("export-edits", "export-edits-2"):
        found = {path for path in (tmp_path / folder).rglob("*") if path.is_file()}
        assert {path.relative_to(tmp_path / folder).as_posix(): path.read_text() for path in found} == edits
    assert (out / "model.safetensors").read_text() == "4"


def test_recorded_files_of_other_formats_are_no_edits(tmp_path: Path) -> None:
    out, said = tmp_path / "export-gguf", list[str]()
    for number in (1, 2):
        with kept_edits(out, said.append), replaced_folder(out) as partial:
            (partial / "model.gguf").write_text(str(number))
            (partial / "Modelfile").write_text("FROM model.gguf")
            write_file_record(partial, {"format": "gguf 1"})
    assert said == []
    (out / "Modelfile").write_text("mine")
    with kept_edits(out, said.append), replaced_folder(out) as partial:
        (partial / "Modelfile").write_text("FROM model.gguf")
    assert (tmp_path / "export-gguf-edits" / "Modelfile").read_text() == "mine"


def test_a_failed_export_leaves_the_edits_where_they_are(tmp_path: Path) -> None:
    _export(tmp_path / "export", 1, [])
    (tmp_path / "export" / "README.md").write_text("mine")
    with (
        pytest.raises(OutputError),
        kept_edits(tmp_path / "export", print),
        replaced_folder(tmp_path / "export" / "README.md" / "x"),
    ):
        pass
    assert (tmp_path / "export" / "README.md").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
