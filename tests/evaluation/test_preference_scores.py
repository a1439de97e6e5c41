"""`ds-finetune eval` on pairs of answers beside formulas written out for one pair at a time."""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ds_finetune import api
from ds_finetune.cli.main import main
from ds_finetune.errors import ConfigError
from tests.running import tiny_task

PAIRS = [("a" * n + "?", "yes" + "b" * (5 * n % 7), "no" + "c" * (3 * n % 5)) for n in range(1, 8)]
BETA = 0.5


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, PreTrainedModel]]:
    """Two models, and pairs whose sides have the same tokens in none."""
    folder = tmp_path_factory.mktemp("pairs")
    tiny_task(folder)
    models = {}
    for name, seed in (("tuned", 1), ("base", 2)):
        torch.manual_seed(seed)
        models[name] = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).float().eval()
        models[name].get_output_embeddings().weight.data.mul_(8.0)
        models[name].save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / name)
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in PAIRS]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder, models


def answers(model: PreTrainedModel, folder: Path, rows: Iterable[tuple[str, ...]] = PAIRS) -> list[tuple[float, int]]:
    """Log-probability and number of tokens of every answer, the chosen one of each pair first; `rows` are a prompt and
    its answers.
    """
    tokenizer, found = AutoTokenizer.from_pretrained(folder / "model"), []
    for prompt, *sides in rows:
        before = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for side in sides:
            first, ids = (
                tokenizer(text, add_special_tokens=False)["input_ids"]
                for text in (before, f"{before}{side}{tokenizer.eos_token}")
            )
            with torch.no_grad():
                logps = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            wanted = range(len(first), len(ids))
            found.append((sum(logps[at - 1, ids[at]].item() for at in wanted), len(wanted)))
    return found


def log_sigmoid(number: float) -> float:
    return -math.log1p(math.exp(-number))


def test_dpo_is_scored_against_its_reference(task: tuple[Path, dict[str, PreTrainedModel]]) -> None:
    folder, models = task
    (tuned, base), margins, chosen = (
        (answers(models[name], folder) for name in ("tuned", "base")),
        list[float](),
        list[float](),
    )
    for number in range(0, 2 * len(PAIRS), 2):
        ratios = [tuned[n][0] - base[n][0] for n in (number, number + 1)]
        margins.append(BETA * (ratios[0] - ratios[1]))
        chosen.append(BETA * ratios[0])
    report = api.evaluate(
        folder / "tuned", folder / "pairs.jsonl", baseline=folder / "base", objective={"name": "dpo", "beta": BETA}
    )
    found = {name: metric.value for name, metric in report.metrics.items()}
    assert found["loss"] == pytest.approx(-sum(map(log_sigmoid, margins)) / len(PAIRS), rel=1e-4)
    assert found["reward_margin"] == pytest.approx(sum(margins) / len(PAIRS), rel=1e-4)
    assert found["reward_chosen"] == pytest.approx(sum(chosen) / len(PAIRS), rel=1e-4)
    assert found["reward_accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / len(PAIRS))
    assert 0 < found["reward_accuracy"] < 1
    assert report.counted == f"{sum(tokens for _, tokens in tuned)} supervised tokens of {len(PAIRS)} pairs"
    assert all(metric.baseline is None for metric in report.metrics.values())


def test_simpo_compares_two_models(
    task: tuple[Path, dict[str, PreTrainedModel]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, models = task
    data = [f"--data={name}={folder / 'pairs.jsonl'}" for name in ("x",)]
    report = folder / "scores.json"
    done = main(
        ["eval", str(folder / "tuned"), "--baseline", str(folder / "base"), *data, "--objective", "simpo", "--limit", "4",
         "--json", str(report)]
    )  # fmt: skip
    assert done == 0
    assert "4 pairs scored" in capsys.readouterr().out
    metrics = json.loads(report.read_text())["data"]["sets"]["x"]
    for name, wanted in (("value", "tuned"), ("baseline", "base")):
        sides = answers(models[wanted], folder)[:8]
        means = [logp / tokens for logp, tokens in sides]
        wins = sum(means[n] > means[n + 1] for n in range(0, 8, 2)) / 4
        assert metrics["reward_accuracy"][name] == wins
        assert metrics["logp_chosen"][name] == pytest.approx(sum(logp for logp, _ in sides[::2]) / 4, rel=1e-4)


@pytest.mark.parametrize("names", [("tuned", "base"), ("base", "tuned")])
def test_kto_is_scored_with_z0_of_all_rows(
    task: tuple[Path, dict[str, PreTrainedModel]], names: tuple[str, str]
) -> None:
    """One of the two directions has a z0 above 0."""
    folder, models = task
    rows = [(prompt, chosen if number % 3 else rejected) for number, (prompt, chosen, rejected) in enumerate(PAIRS)]
    marks = [number % 3 > 0 for number in range(len(rows))]
    marked = [
        {"prompt": prompt, "completion": answer, "label": mark}
        for (prompt, answer), mark in zip(rows, marks, strict=True)
    ]
    (folder / "marked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in marked))
    # Each prompt with the answer of the next one in this order.
    order = np.random.default_rng([0, 0, 1]).permutation(len(rows)).tolist()
    mismatched = [(rows[one][0], rows[other][1]) for one, other in zip(order, [*order[1:], order[0]], strict=True)]
    ratios, others = (
        [mine[0] - base[0] for mine, base in zip(*(answers(models[name], folder, some) for name in names), strict=True)]
        for some in (rows, mismatched)
    )
    z0 = max(0.0, sum(others) / len(others))
    losses = [
        1 - 1 / (1 + math.exp(-BETA * (ratio - z0) * (1 if mark else -1)))
        for ratio, mark in zip(ratios, marks, strict=True)
    ]
    report = api.evaluate(
        folder / names[0],
        folder / "marked.jsonl",
        baseline=folder / names[1],
        objective={"name": "kto", "beta": BETA},
    )
    found = {name: metric.value for name, metric in report.metrics.items()}
    assert found["kl"] == pytest.approx(z0, rel=1e-4, abs=1e-6)
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    good = [BETA * ratio for ratio, mark in zip(ratios, marks, strict=True) if mark]
    assert found["reward_good"] == pytest.approx(sum(good) / len(good), rel=1e-4)
    assert report.counted.endswith(f"of {len(rows)} answers")
    assert all(math.isfinite(number) for metric in report.metrics.values() for number in metric.interval)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"objective": "dpo"}, "objective dpo compares with a reference model, and there is no baseline"),
        ({"objective": "simpo", "extract": "text"}, "--extract text generates answers, but objective simpo"),
        ({"objective": "kto"}, "objective kto compares with a reference model, and there is no baseline"),
        ({"objective": "reward"}, "objective reward has neither"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    task: tuple[Path, dict[str, PreTrainedModel]], options: dict[str, Any], said: str
) -> None:
    folder, _ = task
    with pytest.raises(ConfigError, match=said) as caught:
        api.evaluate(folder / "tuned", folder / "pairs.jsonl", **options)
    assert caught.value.hint
