"""The limits of the house that ruff does not hold: lengths, nesting, names, and messages that carry values."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from ds_finetune.families.table import FAMILIES
from tests.conftest import ROOT
from tests.mutants import MUTANTS, Mutant

PACKAGE = sorted((ROOT / "ds_finetune").rglob("*.py"))
FUNCTION_LINES, NESTING = 80, 3
BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try)
ERRORS = {
    "ConfigError",
    "LaunchError",
    "DataError",
    "ModelError",
    "OutputError",
    "ExportError",
    "RunError",
    "CheckpointError",
}
ERRORS |= {"VerificationError", "ServeError", "RewardError"}


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _depth(node: ast.AST, depth: int = 0) -> int:
    inner = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.FunctionDef)]
    chained = (
        node.orelse if isinstance(node, ast.If) and len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If) else []
    )
    return max(
        [depth] + [_depth(child, depth + (isinstance(child, BLOCKS) and child not in chained)) for child in inner]
    )


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_lengths_and_nesting(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for function in _functions(tree):
        assert (function.end_lineno or 0) - function.lineno < FUNCTION_LINES, function.name
        assert _depth(function) <= NESTING, function.name


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_messages_to_users_carry_a_value_and_a_way_out(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS)
            or not node.args
        ):
            continue
        message = ast.unparse(node.args[0])
        assert "{" in message or ".join" in message, f"line {node.lineno}: {message}"
        assert any(keyword.arg == "hint" for keyword in node.keywords), f"line {node.lineno}: no hint"


def test_model_types_are_named_in_the_tables_of_families_alone() -> None:
    """The demo's own model is one of them. llama.cpp and ONNX Runtime GenAI name rules of tokenizers and decoders after
    some, and other trainers chat templates.
    """
    families = ROOT / "ds_finetune" / "families"
    allowed = {
        *(families / f"{name}.py" for name in ("table", "server_lora")),
        ROOT / "ds_finetune" / "cli" / "demo.py",
        ROOT / "ds_finetune" / "config" / "other_programs.py",
    }
    export = ROOT / "ds_finetune" / "export"
    allowed |= {export / "gguf" / "llama_tokenizer.py", export / "onnx" / "consumers.py"}
    for path in set(PACKAGE) - allowed:
        constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not constants & FAMILIES.keys(), path


def test_no_module_hides_another_when_started_by_path() -> None:
    """Launchers start `ds_finetune/train.py`, so Python puts the package's own folder first on the path."""
    taken = set(sys.stdlib_module_names) | set(packages_distributions()) - {"ds_finetune"}
    names = {
        path.stem
        for path in (ROOT / "ds_finetune").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert not (names - {"__init__", "__main__"}) & taken


def _lines_of_code(path: Path) -> int:
    """Lines without blank ones, comments and docstrings, which the package must have and tests need not."""
    tree = ast.parse(path.read_text())
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    prose = {line for text in texts for line in range(text.lineno, (text.end_lineno or 0) + 1)}
    lines = enumerate(path.read_text().splitlines(), start=1)
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in prose for number, line in lines
    )


def test_each_folder_of_modules_is_a_package() -> None:
    """setuptools leaves a folder without `__init__.py` out of the wheel, and import-linter does not see its imports."""
    assert [path.parent for path in PACKAGE if not (path.parent / "__init__.py").exists()] == []


def test_tests_are_at_least_six_tenths_of_the_source() -> None:
    """The selftest counts with the tests, which it is when a user runs it."""
    inside = set((ROOT / "ds_finetune" / "reference" / "selftest").glob("*.py"))
    source = sum(map(_lines_of_code, set(PACKAGE) - inside))
    tests = sum(map(_lines_of_code, {*(ROOT / "tests").rglob("*.py"), *inside}))
    assert tests >= 0.6 * source


def test_planning_launching_and_the_doctor_load_no_torch() -> None:
    """On every host of a run it would take each of their programs four seconds."""
    modules = (
        "plan.plan",
        "plan.model_shape",
        "cluster.launch.run",
        "cluster.doctor.run",
        "cluster.host_functions",
    )
    code = f"import sys, {', '.join(f'ds_finetune.{name}' for name in modules)}; print({{'torch', 'deepspeed', 'transformers'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_importing_the_package_loads_the_standard_library_alone_and_takes_under_a_tenth_of_a_second() -> None:
    """Seconds of the processor: those on the clock depend on what else the machine does."""
    code = "import sys, time; before, began = set(sys.modules), time.process_time(); import ds_finetune; print(time.process_time() - began)"
    code += "; print(*sorted(sys.modules.keys() - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, loaded = done.stdout.splitlines()
    assert {name for name in loaded.split() if name.split(".")[0] not in sys.stdlib_module_names} == {"ds_finetune"}
    assert float(seconds) < 0.1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_planted_fault_has_its_place(mutant: Mutant) -> None:
    assert (ROOT / "ds_finetune" / mutant.file).read_text().count(mutant.text) == 1
