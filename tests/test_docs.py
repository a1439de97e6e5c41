"""README.md and docs/: links and files exist, commands parse, run files are valid, generated pages are fresh."""

import argparse
import ast
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml

from ds_finetune.cli import main as cli
from ds_finetune.cli.demo import write_demo
from ds_finetune.config.schema import read_config
from ds_finetune.runs.experiments.sweep_file import SweepConfig
from tests.conftest import ROOT
from tests.running import start

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
FILE = re.compile(r"(?<![\w./*-])(?:tests|scripts|docs|ds_configs|hostfiles|ds_finetune)/[\w./-]*\w/?")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
COMMAND = re.compile(r"^\s*(?:\$ )?ds-finetune (.*?)(?: &)?$|ds_finetune/train\.py (.*)")
OPTIONAL = re.compile(r"\[([^\[\]]*)\]")
MISSING = re.compile(r"the following arguments are required|one of the arguments")
SHOWN = ("docs", "examples", "scripts", "ds_configs", "bench", ".ci")
"""Folders with commands that users type or start."""
NAMES = ("RUN.yaml", "X", "Y")
"""Placeholders for what a mention such as `ds-finetune launch --dry-run` leaves out."""
MINIMAL: dict[str, Any] = {"model": "m", "data": {"train": "t.jsonl"}, "output_dir": "o"}
HEREDOC = re.compile(r"^cat > \S*\.yaml <<'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)
GPU_ROWS = {
    "R1-Distill-Qwen-1.5B": "deepseek-ai--DeepSeek-R1-Distill-Qwen-1.5B",
    "DeepSeek-V2-Lite (16B)": "deepseek-ai--DeepSeek-V2-Lite",
}
GPU_COLUMNS = (
    ("1", "deepspeed=zero3"),
    ("8", "deepspeed=zero3"),
    ("64", "deepspeed=zero3"),
    ("256", "deepspeed=zero3"),
    ("1", "deepspeed=zero3 lora.rank=16"),
    ("8", "deepspeed=zero3 lora.rank=16"),
    ("1", "deepspeed=zero2 lora.rank=16 lora.quantize=nf4"),
)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in _anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_file_named_exists(page: Path) -> None:
    """Files by their path from the top, and modules by their path in the package."""
    text = page.read_text(encoding="utf-8")
    missing = {path for path in FILE.findall(text) if not (ROOT / path).exists()}
    packages = "|".join(folder.parent.name for folder in (ROOT / "ds_finetune").glob("*/__init__.py"))
    modules = re.findall(rf"`((?:{packages})(?:/\w+)+\.py)", text)
    assert not missing | {
        path for path in modules if not any((top / path).exists() for top in (ROOT / "ds_finetune", ROOT))
    }


@pytest.mark.parametrize(("page", "text"), runpy.run_path(str(ROOT / "scripts" / "reference.py"))["pages"]().items())
def test_generated_pages_are_those_of_the_program(page: str, text: str) -> None:
    assert (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8") == text, "run: python scripts/reference.py"


@pytest.mark.skipif(not find_spec("mkdocs"), reason="mkdocs is not installed (extra `docs`)")
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """mkdocs checks every link and anchor, and that each page is in the navigation."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_installations_that_are_shown_take_tested_versions() -> None:
    """By constraints.txt, by an extra, whose range is tested, or by a pinned version."""
    shown = [line for page in [*PAGES, *sorted((ROOT / "ds_configs").rglob("*.yaml"))] for line in page.open()]
    commands = [line for line in [*shown, *_messages().splitlines()] if re.search(r"pip install \S", line)]
    assert len(commands) >= 20
    tested = re.compile(r"-c constraints\.txt|ds_finetune|==|pip install …")
    assert not [line for line in commands if not tested.search(line)]


def _messages() -> str:
    """Every text of the package, a line each, with `…` for values."""
    texts = []
    for file in (ROOT / "ds_finetune").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_the_errors_explained_are_those_of_the_program() -> None:
    """A message between `**` and backticks occurs in the source, in pieces between its values."""
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^- \*\*`(.+?)`\*\*", page, re.MULTILINE)
    assert len(quoted) >= 15
    known = _messages()
    unknown = {text for text in quoted for piece in text.split("…") if piece.strip(" `") not in known}
    assert not unknown


def test_no_documented_command_changes_which_gpus_are_visible() -> None:
    """Given a number of GPUs, DeepSpeed 0.19.8 takes the first of the machine, whatever CUDA_VISIBLE_DEVICES says
    (launcher/runner.py:449-460).
    """
    files = [ROOT / "README.md", *(path for top in SHOWN for path in (ROOT / top).rglob("*") if path.is_file())]
    lines = [(path, line) for path in files for line in path.read_text(errors="ignore").splitlines()]
    counting = re.compile(r"\bdeepspeed\b.* --(?:num_gpus|num_nodes|include|exclude)\b")
    assert [(_name(path), line) for path, line in lines if counting.search(line)] == []


def test_the_quickstart_leaves_the_visible_gpus_as_they_are(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    # One write for a line, which the other rank's cannot split.
    program.write_text("import os\nos.write(1, f'sees {os.environ[\"CUDA_VISIBLE_DEVICES\"]}\\n'.encode())\n")
    lines = (ROOT / "scripts" / "quickstart.sh").read_text().splitlines()
    [line] = [line for line in lines if "ds_finetune/train.py" in line]
    command = line.replace("ds_finetune/train.py", str(program)).replace("$ranks", "2")
    done = start(["bash", "-c", f"folder=x; {command}"], {"CUDA_VISIBLE_DEVICES": "2,MIG-3"})
    assert done.stdout.splitlines() == ["sees 2,MIG-3"] * 2, done.stderr


def _written(line: str) -> Iterator[list[str]]:
    """The commands that a line of usage stands for: without its optional parts, and with each of them alone."""
    optional, bare = OPTIONAL.findall(line), OPTIONAL.sub("", line)
    for extra in ("", *optional):
        words = ["1" if word == "N" else word.split("|")[0] for word in shlex.split(f"{bare} {extra}", comments=True)]
        end = next((number for number, word in enumerate(words) if word in ("", "&&", ">")), len(words))
        yield [
            word
            for before, word in zip(["", *words], words[:end], strict=False)
            if word != "..." or before.startswith("-")
        ]


def _commands(text: str) -> Iterator[tuple[str, bool]]:
    """What stands behind `ds-finetune`, and whether it is a mention inside a sentence."""
    for _, block in BLOCK.findall(text):
        for line in re.sub(r"\\\n|\n\s+(?=\[)", " ", block).splitlines():
            yield from ((command[0] or f"train {command[1]}", False) for command in COMMAND.findall(line))
    for code in INLINE.findall(BLOCK.sub("", text)):
        yield from ((command[0] or f"train {command[1]}", True) for command in COMMAND.findall(code))


def _refused(self: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ValueError(message)


def _parse(words: Sequence[str], *, is_mention: bool) -> None:
    """ValueError where the program's own parser refuses the words; a mention may leave out arguments."""
    try:
        cli.parse_arguments(list(words))
    except ValueError as refused:
        if not is_mention or not MISSING.match(str(refused)):
            raise
        if any(word.startswith("-") for word in words):
            cli.parse_arguments([*words, *NAMES[: 1 + ("export" in words)]])


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_command_parses(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "error", _refused)
    for line, is_mention in _commands(page.read_text(encoding="utf-8")):
        for words in _written(line):
            try:
                _parse(words, is_mention=is_mention)
            except (ValueError, SystemExit) as refused:
                pytest.fail(f"{_name(page)}: `ds-finetune {shlex.join(words)}`: {refused}")


@pytest.mark.parametrize(
    ("command", "is_mention"), [("train", False), ("trian RUN.yaml", True), ("export A --dtpye fp8", True)]
)
def test_a_wrong_command_is_noticed(command: str, is_mention: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "error", _refused)
    with pytest.raises(ValueError):
        _parse(command.split(), is_mention=is_mention)


def _run_files(text: str) -> Iterator[str]:
    yield from (block for language, block in BLOCK.findall(text) if language == "yaml")
    yield from HEREDOC.findall(text)


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_run_file_is_valid(page: Path, tmp_path: Path) -> None:
    """`read_config` raises where one is not; a page that shows a part gets what a run file must have."""
    for number, text in enumerate(_run_files(page.read_text(encoding="utf-8"))):
        shown = yaml.safe_load(text)
        if "space" in shown:
            SweepConfig.model_validate(shown)
            continue
        missing = {key: value for key, value in MINIMAL.items() if key not in shown}
        run_file = tmp_path / f"{number}.yaml"
        run_file.write_text(text + (yaml.safe_dump(missing) if missing else ""))
        read_config(run_file)


def test_pages_have_run_files_that_are_checked() -> None:
    shown = {_name(page): len(list(_run_files(page.read_text(encoding="utf-8")))) for page in PAGES}
    assert shown["README.md"] >= 1
    assert sum(number > 0 for number in shown.values()) >= 20


def test_the_readmes_own_data_is_read_as_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the tokenizer of the embedded example, since the model of the README is on the hub."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    pasted = next(block for _, block in blocks if block.startswith("cat >"))
    files, _, command = pasted.rpartition("END\n")
    assert command == "ds-finetune train run.yaml\n"
    assert len(pasted.splitlines()) <= 13
    subprocess.run(["bash", "-euc", f"{files}END\n"], cwd=tmp_path, check=True)
    write_demo(tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["data", "show", "run.yaml", "model=demo/model", "data.workers=1"]) == 0
    shown = capsys.readouterr().out
    assert "⟦I am Iris, the guide of the botanical garden.<|eos|>⟧" in shown
    assert re.search(r"rows read +2\b", shown)


def _row(page: str, first: str) -> list[str]:
    """The cells of the table row of `page` whose first cell is `first`."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


@pytest.mark.parametrize("row", GPU_ROWS)
def test_the_memory_of_published_models_is_the_planners(
    row: str, tmp_path: Path, shared_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file = tmp_path / "run.yaml"
    tree = MINIMAL | {"model": str(shared_data / "configs" / GPU_ROWS[row]), "train": {"global_batch_size": 256}}
    run_file.write_text(yaml.safe_dump(tree))
    for (gpus, overrides), cell in zip(GPU_COLUMNS, _row("docs/how-to/choose-layout.md", row)[1:], strict=True):
        assert cli.main(["plan", str(run_file), "--gpus", gpus, "--tensors", *overrides.split()]) == 0
        printed = " ".join(capsys.readouterr().out.split("state of a rank")[1].split("\n\n")[0].split())
        sizes = dict(re.findall(r"([a-z][\w' ]+?) ([\d.,]+) GiB", printed))
        # Stages 2 and 3 keep gradients of a part alone.
        gradients = "gradients" if "gradients" in sizes else "gradients of this rank's part"
        names = ("weights in four bits", "weights", "fp32 weights", "moments", gradients)
        states = [float(sizes[name].replace(",", "")) for name in names if name in sizes]
        assert len(states) >= 4, printed
        assert float(cell) == pytest.approx(sum(states), abs=0.07), printed


def test_the_site_lists_every_page() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
