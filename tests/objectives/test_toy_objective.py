"""An objective of another package: an entry point names its module, and a run file names the objective."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ds_finetune import read_config, train
from ds_finetune.config import objectives
from ds_finetune.config.schema import RunConfig
from ds_finetune.data.prepare import TokenLimits, prepare_rows
from ds_finetune.data.row_kind import RowKind
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import ConfigError
from tests.running import metrics, tiny_task

BETA, PAIRS, STEPS, LR = 0.7, 8, 2, 1e-3
ANSWERS = [{"prompt": f"say {n}", "chosen": f"yes {n}", "rejected": "no" * (1 + n % 3)} for n in range(PAIRS)]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that offers the objective `toy`, which is forgotten afterwards."""
    info = tmp_path / "site" / "toy-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{objectives.ENTRY_POINTS}]\ntoy = tests.objectives.toy_objective\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    del objectives.OBJECTIVES["toy"]
    objectives._sections.cache_clear()


@pytest.mark.usefixtures("installed")
def test_two_steps_of_an_objective_of_another_package_equal_a_plain_loop(tmp_path: Path) -> None:
    run_file = tiny_task(
        tmp_path,
        objective={"name": "toy", "beta": BETA},
        model=str(tmp_path / "model"),
        train={"for": f"{STEPS} steps", "global_batch_size": PAIRS, "max_grad_norm": 0},
        optim={"lr": LR, "warmup": "0%", "min_lr_ratio": 1.0},
        export={"at_end": False},
    )
    for name in ("train", "eval"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ANSWERS))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model")).float()
    kept = (tmp_path / "model" / "config.json").read_text()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(kept)
    config = read_config(run_file)
    train(config)
    records = metrics(tmp_path)
    assert [record["train/loss"] for record in records] == pytest.approx(_plain_losses(model, config), rel=1e-5)
    assert records[-1]["train/reward_margin"] > records[0]["train/reward_margin"]
    with pytest.raises(ConfigError) as unknown:
        objectives.read_objective({"name": "toy", "bta": 1})
    assert "bta" in unknown.value.message
    with pytest.raises(ConfigError, match="is 'toyy', which is no objective") as misspelt:
        objectives.read_objective("toyy")
    assert "did you mean `toy`?" in misspelt.value.hint


def _plain_losses(model: PreTrainedModel, config: RunConfig) -> list[float]:
    """The losses of steps on all pairs, one answer per forward, with transformers' logits and torch's AdamW."""
    rows = prepare_rows(
        config.data,
        "train",
        tokenizer=load_tokenizer(config.model.path),
        limits=TokenLimits(config.train.max_seq_len, model.config.vocab_size),
        kind=RowKind.of(config.objective),
    )
    optim = torch.optim.AdamW(model.parameters(), lr=LR, betas=config.optim.betas, eps=config.optim.eps, weight_decay=0)
    losses = []
    for _ in range(STEPS):
        means = torch.stack([_mean_log_prob(model, *rows.document(number)) for number in range(2 * PAIRS)])
        loss = torch.exp(-BETA * (means[::2] - means[1::2])).mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses


def _mean_log_prob(model: PreTrainedModel, ids: list[int], is_supervised: list[bool]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    log_probs = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    return log_probs[torch.tensor(is_supervised[1:])].mean()
