"""Imports that wait for their first use: what a start does not import, and that the real thing is used when it is."""

import ast
import importlib
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers.utils import import_utils

from ds_finetune.patches import deferred_compiler, deferred_names, import_contexts
from ds_finetune.patches.deferred_compiler import _disabling_at_need, _without_breaks
from ds_finetune.patches.kept_scan import scan_or_read
from ds_finetune.patches.transformers_import import DEFERRED, remember_folders


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """A module that imports `deferred_rare` later."""
    (tmp_path / "deferred_rare.py").write_text("class Thing:\n    size = 3\ndef double(x):\n    return 2 * x\n")
    (tmp_path / "deferred_user.py").write_text(
        "import deferred_rare\nfrom deferred_rare import Thing, double\ndef make() -> Thing | None:\n    return Thing()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("deferred_rare", "deferred_user"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with deferred_names.deferring("deferred_user", ["deferred_rare"]):
        user = importlib.import_module("deferred_user")
    assert "deferred_rare" not in sys.modules
    return user


def test_a_start_imports_no_compiler_and_what_was_deferred_works_when_it_is_used() -> None:
    worker = Path(__file__).with_name("start_worker.py")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run([sys.executable, worker], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "imported": [],
        "joined": [True, True, False],
        "allowed": True,
        "disabled": True,
        "real": True,
        "instance": False,
        "assigned": [0, 1],
        "styles": ["all_reduce", "colwise", "colwise_gather_output"],
        "placement": True,
        "subclass": True,
    }


def test_isinstance_is_false_and_imports_nothing_until_there_is_the_class(user: object) -> None:
    assert not isinstance(1, user.Thing)  # type: ignore[attr-defined]
    assert not issubclass(int, user.Thing)  # type: ignore[attr-defined]
    assert "deferred_rare" not in sys.modules
    rare = importlib.import_module("deferred_rare")
    assert isinstance(rare.Thing(), user.Thing)  # type: ignore[attr-defined]
    assert issubclass(rare.Thing, user.Thing)  # type: ignore[attr-defined]
    assert not isinstance(1, user.Thing)  # type: ignore[attr-defined]


def test_a_call_and_an_attribute_are_those_of_the_real_thing(user: object) -> None:
    assert user.double(4) == 8  # type: ignore[attr-defined]
    assert user.Thing.size == 3  # type: ignore[attr-defined]
    assert type(user.make()) is sys.modules["deferred_rare"].Thing  # type: ignore[attr-defined]
    assert user.deferred_rare.Thing is sys.modules["deferred_rare"].Thing  # type: ignore[attr-defined]


def test_a_class_that_derives_from_a_stand_in_derives_from_the_real_class(user: object) -> None:
    class Derived(user.Thing):  # type: ignore[misc, name-defined]
        pass

    assert Derived.__mro__[1] is sys.modules["deferred_rare"].Thing
    assert Derived().size == 3


def test_a_name_that_the_module_lacks_is_an_error_at_its_use(user: object) -> None:
    with pytest.raises(AttributeError, match="deferred_rare"):
        user.deferred_rare.absent  # type: ignore[attr-defined] # noqa: B018


def test_other_importers_and_packages_that_are_not_installed_are_as_usual(user: object) -> None:
    with deferred_names.deferring("another", ["deferred_rare", "no_such_package"]):
        from deferred_rare import Thing  # type: ignore[import-not-found]
    assert not isinstance(Thing, deferred_names.DeferredName)
    source = "from no_such_package import name"
    with (
        deferred_names.deferring("another", ["no_such_package"]),
        pytest.raises(ModuleNotFoundError, match="no_such_package"),
    ):
        exec(source, {"__name__": "another"})


def test_only_modules_with_a_context_are_found() -> None:
    assert import_contexts._FINDER.find_spec("json", None) is None


@pytest.mark.parametrize("importer", DEFERRED)
def test_no_importer_compares_a_deferred_name_by_identity(importer: str) -> None:
    """A stand-in is another object: `is`, `==`, `in` and keys of dicts would differ without an error.

    A stand-in for a module, as `import trio` binds it, gives the module's own objects.
    """
    spec = find_spec(importer)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    package = importer.rpartition(".")[0]
    names = {alias.asname or alias.name for node in ast.walk(tree) for alias in _deferred(node, package, importer)}
    assert names or importer.startswith("httpcore2.")
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.Dict | ast.Set | ast.ExceptHandler):
            parts = ast.walk(node.type or node) if isinstance(node, ast.ExceptHandler) else _operands(node)
            used = {part.id for part in parts if isinstance(part, ast.Name)}
            assert not used & names, ast.unparse(node)


def _operands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    return [part for part in (node.keys if isinstance(node, ast.Dict) else node.elts) if part]  # type: ignore[attr-defined]


def _deferred(node: ast.AST, package: str, importer: str) -> list[ast.alias]:
    """What `from MODULE import NAME` takes from modules that `importer` defers."""
    if not isinstance(node, ast.ImportFrom):
        return []
    parents = package.rsplit(".", node.level - 1)[0] if node.level else ""
    module = f"{parents}.{node.module}" if node.level else node.module
    return node.names if module in DEFERRED[importer] else []


def test_folders_are_scanned_once_and_results_can_be_changed(tmp_path: Path) -> None:
    scanned = []

    def scan(path: str) -> dict[object, object]:
        scanned.append(path)
        return {frozenset(): {"module": {"Name"}}}

    once = remember_folders(scan, models=tmp_path, scanner=Path(__file__))
    first = once("models")
    first[frozenset()]["module"].add("Other")
    assert once("models/__init__.py") == {frozenset(): {"module": {"Name"}}}
    assert scanned == ["models"]


def test_what_was_found_in_models_is_kept_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    models, scanner = tmp_path / "models", tmp_path / "scanner.py"
    (models / "a").mkdir(parents=True)
    source = models / "a" / "modeling_a.py"
    source.write_text("")
    scanner.write_text("")
    found = {"a": {frozenset({"torch"}): {"modeling_a": {"A", "B"}}}}
    scanned = []

    def start() -> int:
        """A new process's scan of the models; how often they were read so far."""
        once = remember_folders(lambda path: scanned.append(path) or found, models=models, scanner=scanner)
        assert once(str(models)) == found
        return len(scanned)

    assert [start(), start()] == [1, 1]
    source.write_text("x")
    assert [start(), start()] == [2, 2]
    scanner.write_text("x")
    assert [start(), start()] == [3, 3]
    (kept,) = (tmp_path / "cache" / "ds_finetune" / "model_names").iterdir()
    kept.write_bytes(kept.read_bytes()[:-9])
    assert [start(), start()] == [4, 4], "a damaged file is written again"
    kept.unlink()
    kept.mkdir()
    assert start() == 5, "a file that cannot be written is done without"


def test_the_names_in_transformers_models_are_the_same_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    scan = inspect.unwrap(import_utils.create_import_structure_from_path)
    scanner = Path(import_utils.__file__)
    models = scanner.parents[1] / "models"
    first, kept = (scan_or_read(scan, models, also=scanner) for _ in range(2))
    assert kept == first
    assert kept["llama"][frozenset({"torch"})]["modeling_llama"] >= {"LlamaModel"}


def test_the_compiler_is_asked_once_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def disable(fn: object, recursive: bool = True) -> object:
        calls.append(recursive)
        return lambda *args: fn.__dynamo_disable(*args)  # type: ignore[attr-defined]

    def plain(number: int) -> int:
        return number + 1

    disabled = _disabling_at_need(disable)(recursive=False)(plain)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert disabled(1) == 2

    class Compiler:
        @staticmethod
        def disable(fn: object, recursive: bool, *, wrapping: bool) -> object:
            calls.append((fn, recursive, wrapping))
            return lambda number: number + 10

    monkeypatch.setitem(sys.modules, "torch._dynamo", Compiler)  # type: ignore[arg-type]
    assert (disabled(1), disabled(2)) == (11, 12)
    assert calls == [False, (plain, False, False)]


def test_a_call_waits_for_the_compiler_that_another_thread_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = "def disable(fn, recursive, *, wrapping):\n    return lambda number: number + 10\n"
    (tmp_path / "slow_compiler.py").write_text(f"import time\ntime.sleep(0.2)\n{compiler}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(deferred_compiler, "_DYNAMO", "slow_compiler")

    def plain(number: int) -> int:
        return number + 1

    disabled = _disabling_at_need(lambda fn, _: lambda *args: fn.__dynamo_disable(*args))(plain)
    thread = threading.Thread(target=importlib.import_module, args=["slow_compiler"])
    thread.start()
    while "slow_compiler" not in sys.modules:
        time.sleep(0.001)
    assert disabled(1) == 11
    thread.join()
    del sys.modules["slow_compiler"]


@pytest.mark.parametrize("is_differentiable", [True, False])
def test_an_optimizers_step_records_gradients_as_torch_has_it(
    is_differentiable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch.optim import optimizer as torch_optimizer

    class Optimizer:
        def __init__(self) -> None:
            self.defaults = {"differentiable": is_differentiable}

        def step(self) -> bool:
            return torch.is_grad_enabled()

    plain = _without_breaks(torch_optimizer._use_grad_for_differentiable)(Optimizer.step)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    for is_enabled in (True, False):
        with torch.set_grad_enabled(is_enabled):
            assert plain(Optimizer()) is is_differentiable
            assert torch.is_grad_enabled() is is_enabled
