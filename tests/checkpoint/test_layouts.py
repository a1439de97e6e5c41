"""State saved at any layout and restored at any other goes on as if nothing had happened."""

import json
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoint.layouts import LAYOUTS, PLAIN, Layout, hf_config_of, others
from tests.pairwise import each_value
from tests.running import EAGER, build_ops, start, torchrun

WORKER = Path(__file__).with_name("worker.py")
PRECISE = [Layout(stage, precision="bf16") for stage in range(4)]
PACKED = [Layout(stage, packing=True) for stage in (0, 3)]
DENSE = [Layout(2, family="qwen2"), Layout(3, family="qwen2"), Layout(1, family="qwen2", pp=2)]
"""Tied weights, of which a pipeline has one on each end."""
INTERLEAVED = [
    Layout(1, family="deepseek_v3_deep", pp=2, vpp=2),
    Layout(0, family="deepseek_v3_deep", pp=2),
    Layout(3, family="deepseek_v3_deep"),
]
"""Two chunks of layers on each pipeline rank, to one chunk, to none and back."""
OTHERS = [Layout(0, name="Muon"), Layout(1, name="Muon"), Layout(3, name="Muon"), Layout(2, "cpu", name="Muon")]
OTHERS += [Layout(0, name="Adagrad"), Layout(0, name="SGD"), Layout(3, name="SGD")]
WHOLE = [
    Layout(0, name=name, precision=precision) for name in ("Adafactor", "AdamW8bit") for precision in ("fp32", "bf16")
]
"""States with other shapes than their parameters, which every rank holds whole."""
OTHERS += [*WHOLE, Layout(1, name="RAdam"), Layout(3, name="Adamax"), Layout(2, name="RMSprop")]
"""Saved and restored at the same layout, where the numbers must be the same bits."""
COMPILED = [Layout(1, "cpu", name="Lion"), Layout(2, "cpu", name="Adagrad")]
"""The same of optimizers whose CPU kernels are compiled for minutes at first use."""
CHOSEN = (*PLAIN, Layout(2, family="wide"), Layout(3, "nvme", "nvme", family="wide"))
"""Every stage and offload, of those on NVMe the one with most on it; the others are in the slow matrix."""
PARALLEL = (
    Layout(2, sp=2),
    Layout(0, tp=2),
    Layout(1, ep=2),
    Layout(2, "cpu", tp=2),
    Layout(3, ep=2),
    Layout(3, tp=2),
    Layout(0, pp=2),
    Layout(1, pp=2),
)
"""Layouts of two ranks that work on the same rows, to and from those that do not."""
TRANSPOSED = tuple(
    Layout(stage, family="gpt_oss", **sizes)
    for stage, sizes in ((2, {}), (1, {"ep": 2}), (0, {"tp": 2}), (3, {"tp": 2}))
)
"""Experts [experts, inputs, outputs] with biases, of which ranks hold other parts than of DeepSeek's."""
Change = tuple[Layout, int, Layout, int]
"""Saved at a layout on a number of ranks, restored at another on another."""


def run(world: int, save: Sequence[Layout], restore: Sequence[tuple[str, Layout]], folder: Path) -> dict[str, Any]:
    """One launch that saves and restores; its findings by `saved LAYOUT@WORLD` and `SOURCE -> LAYOUT@WORLD`."""
    job = {
        "save": [asdict(layout) for layout in save],
        "restore": [(source, asdict(layout)) for source, layout in restore],
    }
    job |= {
        "models": str(folder / "models"),
        "folder": str(folder / "states"),
        "disk": str(folder / "disk"),
        "out": str(folder / f"out-{world}.json"),
    }
    job_file = folder / f"job-{world}.json"
    job_file.write_text(json.dumps(job))
    done = start(torchrun(str(WORKER), str(job_file), ranks=world), EAGER, timeout=3000)
    assert done.returncode == 0, done.stderr[-6000:]
    return dict(json.loads(Path(job["out"]).read_text()))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Models and room for states, in memory where direct reads take any address."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False) or not Path("/dev/shm").is_dir():
        pytest.skip("async_io cannot be built here: libaio is missing (Debian: libaio-dev), or there is no /dev/shm")
    build_ops("async_io", "cpu_adam")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        for family in ("deepseek_v3", "deepseek_v3_deep", "qwen2", "wide", "gpt_oss"):
            torch.manual_seed(11)
            AutoModelForCausalLM.from_config(hf_config_of(family)).float().save_pretrained(
                Path(name) / "models" / family
            )
        yield Path(name)


def name_of(layout: Layout, world: int) -> str:
    return f"{layout.text}@{world}"


def _same() -> list[Layout]:
    """Layouts that are saved on two ranks and restored at themselves."""
    return [*CHOSEN, *PRECISE, *PACKED, *DENSE, *INTERLEAVED[:1], *OTHERS, *PARALLEL]


def _changes() -> list[Change]:
    """From a layout on some ranks to another on others."""
    given = [(_shifted(layout, 3), 2, layout, 1) for layout in CHOSEN]
    given += [(PLAIN[(n + 1) % 4], 1, layout, 2) for n, layout in enumerate(PLAIN)]
    given += [(layout, 2, _shifted(layout, 5), 2) for layout in CHOSEN]
    for n, layout in enumerate(PARALLEL):
        given += [
            (layout, 2, PLAIN[(n + 1) % len(PLAIN)], 2),
            (PLAIN[n % len(PLAIN)], 2, layout, 2),
            (PARALLEL[n - 1], 2, layout, 2),
        ]
    given += [(layout, 2, layout, 1) for layout in WHOLE]
    given += [(Layout(stage, name=name), 2, Layout(3, name=name), 1) for stage, name in ((1, "RAdam"), (2, "Adamax"))]
    return given + [
        (layouts[n - 1], 2, layout, 2) for layouts in (DENSE, INTERLEAVED) for n, layout in enumerate(layouts)
    ]


def _shifted(layout: Layout, by: int) -> Layout:
    family = [other for other in CHOSEN if other.family == layout.family]
    return family[(family.index(layout) + by) % len(family)]


def _axes(layout: Layout) -> tuple[Hashable, ...]:
    where, shared = (layout.optimizer, layout.param), (layout.pp, layout.vpp, layout.sp, layout.tp, layout.ep)
    return (layout.precision, layout.stage), where, layout.packing, layout.name, layout.family, shared


def _change_axes(change: Change) -> tuple[Hashable, ...]:
    source, source_world, target, target_world = change
    moved = [(layout.optimizer, layout.param, *_axes(layout)[-2:]) for layout in (source, target)]
    return (source.stage, target.stage), (source_world, target_world), *moved, (source.name,)


SAME = each_value([layout for layout in _same() if layout.vpp == 1], _axes)
CHANGES = each_value(
    [change for change in _changes() if change[0] != INTERLEAVED[1] or change[2].vpp > 1], _change_axes
)
"""Every stage to every other, and every way of keeping state once; the others are behind the marker."""


def _save_and_restore(same: Sequence[Layout], changes: Sequence[Change], folder: Path) -> dict[str, Any]:
    sources = list(dict.fromkeys([*same, *(source for source, world, _, _ in changes if world == 2)]))
    seen = run(2, sources, [(name_of(layout, 2), layout) for layout in same], folder)
    alone = list(dict.fromkeys(source for source, world, _, _ in changes if world == 1))
    seen |= run(
        1, alone, [(name_of(source, world), target) for source, world, target, ranks in changes if ranks == 1], folder
    )
    return seen | run(
        2, [], [(name_of(source, world), target) for source, world, target, ranks in changes if ranks == 2], folder
    )


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    """Saved on two ranks and on one, restored at the same layout and at a choice of others."""
    return _save_and_restore(SAME, CHANGES, folder)


@pytest.fixture(scope="module")
def rest(folder: Path) -> dict[str, Any]:
    """What `found` leaves out."""
    same, changes = (
        [one for one in every if one not in chosen] for every, chosen in ((_same(), SAME), (_changes(), CHANGES))
    )
    return _save_and_restore(same, changes, folder)


def losses(steps: Sequence[dict[str, Any]]) -> list[float]:
    return [step["loss"] for step in steps]


def assert_goes_on(value: dict[str, Any], wanted: dict[str, Any], key: str) -> None:
    """Another layout takes sums in another order: the first loss differs by a few roundings of fp32. Later ones differ
    by more, since Adam divides by a root of squares: where a gradient is nearly zero, its rounding decides the step.
    """
    found, expected = losses(value["after"]), losses(wanted["after"])
    assert found[0] == pytest.approx(expected[0], rel=8 * torch.finfo(torch.float32).eps), key
    assert found == pytest.approx(expected, rel=1e-5), key
    assert value["weights"] == pytest.approx(wanted["weights"], rel=1e-5), key


def assert_same_bits(found: dict[str, Any], layouts: int) -> None:
    same = {
        key: value for key, value in found.items() if " -> " in key and key.split(" -> ")[0] == key.split(" -> ")[1]
    }
    assert len(same) == layouts
    for key, value in same.items():
        wanted = found[f"saved {key.split(' -> ')[0]}"]
        assert value["after"] == wanted["after"], key
        assert value["weights"] == wanted["weights"], key


def assert_same_numbers(found: dict[str, Any], changes: int) -> None:
    other = {
        key: value for key, value in found.items() if " -> " in key and key.split(" -> ")[0] != key.split(" -> ")[1]
    }
    assert len(other) == changes
    for key, value in other.items():
        assert_goes_on(value, found[f"saved {key.split(' -> ')[0]}"], key)


def test_the_same_layout_gives_the_same_bits(found: dict[str, Any]) -> None:
    assert_same_bits(found, len(SAME))


def test_another_layout_gives_the_same_numbers(found: dict[str, Any]) -> None:
    assert_same_numbers(found, len(CHANGES))


@pytest.mark.slow
def test_the_other_layouts(rest: dict[str, Any]) -> None:
    assert_same_bits(rest, len(_same()) - len(SAME))
    assert_same_numbers(rest, len(_changes()) - len(CHANGES))


def test_the_steps_would_show_a_lost_moment(found: dict[str, Any]) -> None:
    """What is compared moves by much more than the tolerance from step to step."""
    steps = found[f"saved {name_of(SAME[0], 2)}"]
    assert abs(losses(steps["after"])[0] - losses(steps["after"])[1]) > 1e-3


@pytest.mark.slow
def test_transposed_experts(folder: Path) -> None:
    """Restored at the same layout and at the next one."""
    pairs = [
        (name_of(layout, 2), other) for n, layout in enumerate(TRANSPOSED) for other in (layout, TRANSPOSED[n - 1])
    ]
    seen = run(2, TRANSPOSED, pairs, folder)
    assert_same_bits(seen, len(TRANSPOSED))
    assert_same_numbers(seen, len(TRANSPOSED))


@pytest.mark.slow
def test_compiled_optimizers_give_the_same_bits(folder: Path) -> None:
    build_ops("cpu_lion", "cpu_adagrad")
    seen = run(2, COMPILED, [(name_of(layout, 2), layout) for layout in COMPILED], folder)
    for layout in COMPILED:
        name = name_of(layout, 2)
        assert seen[f"{name} -> {name}"]["after"] == seen[f"saved {name}"]["after"]
        assert seen[f"{name} -> {name}"]["weights"] == seen[f"saved {name}"]["weights"]


@pytest.fixture(scope="module")
def everything(folder: Path) -> dict[str, Any]:
    """Saved at every layout on 1, 2 and 4 ranks."""
    return {key: value for ranks in (1, 2, 4) for key, value in run(ranks, LAYOUTS, [], folder).items()}


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_layout_from_every_other(folder: Path, everything: dict[str, Any], world: int) -> None:
    """Restored at every layout on `world` ranks."""
    pairs = [(name_of(source, ranks), layout) for ranks in (1, 2, 4) for source in LAYOUTS for layout in others(source)]
    seen = run(world, [], pairs, folder)
    assert len(seen) == len(pairs)
    for key, value in seen.items():
        source = everything[f"saved {key.split(' -> ')[0]}"]
        assert_goes_on(value, source, key)
