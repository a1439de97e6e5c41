"""Whole runs of objectives from the run file to plain transformers: train, resume, export, verify, score, export again.

Each objective is trained whole and by adapters; most of these runs are slow tests.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    pipeline,
)

from ds_finetune import api
from ds_finetune.cli.main import main
from ds_finetune.export.verify.record import UNVERIFIED, ExportRecord
from tests.running import metrics, start, tiny_task, torchrun

CLASSES = ("billing", "bug", "praise")
SCORED = ("classification", "reward")
LORA = {"rank": 8, "alpha": 16}
STEPS, HALF = 4, 2


@dataclass(frozen=True)
class Run:
    """A run that was resumed at its middle, and what it printed then."""

    objective: str
    has_adapters: bool
    folder: Path
    printed: str

    @property
    def exported(self) -> Path:
        """Its export."""
        return self.folder / "run" / "export"


def rows_of(objective: str, count: int, seed: str) -> list[dict[str, Any]]:
    """Rows of an objective; texts tell the classes apart, and good answers from bad ones."""
    rows = []
    for number in range(count):
        kind = number % len(CLASSES)
        if objective == "classification":
            rows.append({"text": f"{seed} {number} {CLASSES[kind] * 2}", "label": CLASSES[kind]})
        elif objective == "kto":
            is_good = number % 2 == 0
            rows.append({"prompt": f"{seed} {number}", "completion": "yes" if is_good else "nope", "label": is_good})
        else:
            rows.append({"prompt": f"{seed} {number}", "chosen": f"yes {kind}", "rejected": f"nope {number}"})
    return rows


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _trained(objective: str, folder: Path, *, has_adapters: bool, parallel: dict[str, int] | None = None) -> Run:
    run_file = tiny_task(
        folder,
        objective=objective,
        parallel=parallel or {},
        deepspeed={"zero_optimization": {"stage": 1 if parallel else 2}},
        export={"verify": True},
        checkpoint={"every": f"{HALF} steps"},
        optim={"lr": 1e-2},
        model={"weights": "random"} if not has_adapters else {"weights": "load"},
        **({"lora": LORA} if has_adapters else {}),
    )
    if has_adapters:
        torch.manual_seed(2)
        config = AutoConfig.from_pretrained(folder / "model")
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    _write(folder / "train.jsonl", rows_of(objective, 32, "t"))
    _write(folder / "eval.jsonl", rows_of(objective, 9, "e"))
    command = [sys.executable, "ds_finetune/train.py", str(run_file)]
    if parallel:
        command = torchrun(*command[1:], ranks=2)
    first = start([*command, f"train.for={HALF} steps", "export.at_end=false"])
    assert first.returncode == 0, first.stdout + first.stderr
    second = start([*command, f"train.for={STEPS} steps"])
    assert second.returncode == 0, second.stdout + second.stderr
    return Run(objective, has_adapters, folder, second.stdout + second.stderr)


def _cells() -> list[Any]:
    # Whole runs of kto without an export are in test_kto.py.
    fast = {("classification", False), ("dpo", True)}
    cells = [(objective, has) for objective in ("classification", "reward", "dpo", "kto") for has in (False, True)]
    return [
        pytest.param(cell, id=f"{cell[0]}-{'adapters' if cell[1] else 'whole'}")
        if cell in fast
        else pytest.param(cell, id=f"{cell[0]}-{'adapters' if cell[1] else 'whole'}", marks=pytest.mark.slow)
        for cell in cells
    ]


@pytest.fixture(scope="module", params=_cells())
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run of an objective, whole or by adapters."""
    objective, has_adapters = request.param
    return _trained(objective, tmp_path_factory.mktemp(objective), has_adapters=has_adapters)


def _plain(folder: Path, objective: str) -> PreTrainedModel:
    kind = AutoModelForSequenceClassification if objective in SCORED else AutoModelForCausalLM
    model, report = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    return model.eval()  # type: ignore[no-any-return]


def _outputs(model: PreTrainedModel, prompt: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([list(prompt)])).logits[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of one rank with adapters."""
    return {
        name: _trained(name, tmp_path_factory.mktemp(f"{name}-alone"), has_adapters=True)
        for name in ("dpo", "orpo", "kto")
    }


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "pp", "sp", "ep"])
@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
def test_two_ranks_that_share_rows_or_weights_train_the_same_adapters(
    objective: str, axis: str, alone: dict[str, Run], tmp_path: Path
) -> None:
    shared, wanted = _trained(objective, tmp_path, has_adapters=True, parallel={axis: 2}), alone[objective]
    test_it_resumes_and_its_export_is_verified(shared)
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        found, known = ([each[key] for each in metrics(one.folder) if key in each] for one in (shared, wanted))
        assert found == pytest.approx(known, rel=1e-4), key
    ours, theirs = (_weights(one.exported) for one in (shared, wanted))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def test_it_resumes_and_its_export_is_verified(run: Run) -> None:
    assert [record["step"] for record in metrics(run.folder)] == [*range(1, STEPS + 1)]
    assert f"step-{HALF:06d}, step {HALF} of" in run.printed
    assert not (run.exported / UNVERIFIED).exists()
    assert f"verified: {run.exported}" in run.printed
    if run.objective in ("dpo", "reward"):
        assert metrics(run.folder)[0]["train/loss"] == pytest.approx(0.693147, abs=1e-3)


def test_plain_transformers_gives_what_the_run_computed(run: Run) -> None:
    record = ExportRecord.read(run.exported)
    assert record.logits is not None
    model = _plain(run.exported, run.objective)
    found = torch.cat([_outputs(model, prompt).flatten() for prompt in record.prompts])
    wanted = torch.from_numpy(record.logits.copy())
    assert record.stride == 1
    torch.testing.assert_close(found, wanted, atol=2e-5 * float(wanted.abs().max()), rtol=0)


def test_a_checkpoint_is_exported_with_the_same_weights(run: Run) -> None:
    out = run.folder / "again"
    assert main(["export", str(run.folder / "run"), str(out), "--dtype", "fp32", "--no-verify"]) == 0
    found, wanted = (load_file(folder / "model.safetensors") for folder in (out, run.exported))
    assert found.keys() == wanted.keys()
    assert ("score.weight" in found) == (run.objective in SCORED)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=0)
    config, of_run = (json.loads((folder / "config.json").read_text()) for folder in (out, run.exported))
    assert config == of_run


def test_eval_gives_the_metrics_of_training(run: Run) -> None:
    if run.objective not in SCORED:
        pytest.skip("a language model is scored by its answers")
    found = api.evaluate(run.exported, run.folder / "eval.jsonl").metrics
    last = metrics(run.folder)[-1]
    names = ("accuracy", "matthews") if run.objective == "classification" else ("reward_accuracy", "reward_margin")
    for name in ("loss", *names):
        assert found[name].value == pytest.approx(last[f"eval/{name}"], abs=1e-4), name


def test_a_pipeline_classifies_as_the_run(run: Run) -> None:
    """With the tokenizer of the folder, which ends each text as training did, alone and in padded batches."""
    if run.objective != "classification":
        pytest.skip("only a classifier has a pipeline")
    texts = [row["text"] for row in rows_of("classification", 6, "e")]
    model, tokenizer = _plain(run.exported, run.objective), AutoTokenizer.from_pretrained(run.folder / "model")
    prompts = [(*tokenizer(text)["input_ids"], tokenizer.eos_token_id) for text in texts]
    wanted = [_outputs(model, prompt).softmax(-1).tolist() for prompt in prompts]
    classify = pipeline("text-classification", model=str(run.exported), top_k=None)
    for found in (classify(texts), classify(texts, batch_size=3)):
        for entries, scores in zip(found, wanted, strict=True):
            assert {entry["label"]: entry["score"] for entry in entries} == pytest.approx(
                dict(zip(CLASSES, scores, strict=True)), abs=1e-5
            )


def test_peft_loads_the_adapter(run: Run) -> None:
    if not run.has_adapters:
        pytest.skip("trained whole")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    kind, settings = AutoModelForCausalLM, {}
    if run.objective in SCORED:
        config = AutoConfig.from_pretrained(run.exported)
        kind = AutoModelForSequenceClassification
        settings = {"num_labels": config.num_labels, "pad_token_id": config.pad_token_id}
    base = kind.from_pretrained(run.folder / "model", dtype=torch.float32, **settings)
    adapted = peft.PeftModel.from_pretrained(base, run.folder / "run" / "adapter").eval()
    model = _plain(run.exported, run.objective)
    for prompt in ExportRecord.read(run.exported).prompts[:3]:
        torch.testing.assert_close(_outputs(adapted, prompt), _outputs(model, prompt), atol=1e-5, rtol=1e-4)


def test_a_run_goes_on_from_the_export(run: Run) -> None:
    """A classifier's classes and head are those of its base; a preference-trained model is a base like any other."""
    tree = yaml.safe_load((run.folder / "run.yaml").read_text())
    tree |= {"model": {"path": str(run.exported)}, "output_dir": str(run.folder / "next"), "lora": None}
    tree |= {"export": {"at_end": False}, "checkpoint": {"resume": "never"}, "optim": {"lr": 1e-9}}
    tree["train"]["for"] = "1 steps"
    (run.folder / "next.yaml").write_text(yaml.safe_dump(tree))
    done = start([sys.executable, "ds_finetune/train.py", str(run.folder / "next.yaml")])
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads((run.folder / "next" / "metrics.jsonl").read_text().splitlines()[-1])
    if run.objective in SCORED:
        assert last["eval/loss"] == pytest.approx(metrics(run.folder)[-1]["eval/loss"], abs=1e-4)
