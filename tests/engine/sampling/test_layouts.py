"""Every layout samples the same answers, those of plain transformers on one rank."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ds_finetune.engine.sampling.answers import SampledAnswer
from ds_finetune.reference.selftest.cells import hf_config
from tests.engine.sampling.plain import assert_same, plain_answer, prompts_of
from tests.engine.sampling.worker import GROUP, LAYOUTS, LENGTHS, LIMITS, WITH_STEP
from tests.parity.four_bit import HAS_FOUR_BIT, WIDE, write_wide
from tests.rounding import rounding_of_outputs
from tests.running import start, torchrun

RUNS = {
    1: ("zero0", "lora"),
    2: tuple(name for name in LAYOUTS if HAS_FOUR_BIT or name != "qlora"),
    3: ("zero3", "zero1"),
}
"""Layouts by the number of ranks."""


@cache
def _plain(family: str) -> PreTrainedModel:
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(hf_config(family)).float().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3 if param.ndim > 1 else 1)
    return model  # type: ignore[no-any-return]


@cache
def _wanted(family: str) -> list[list[SampledAnswer]]:
    prompts = prompts_of(LENGTHS)
    return [[plain_answer(_plain(family), prompt, sample, LIMITS) for sample in range(GROUP)] for prompt in prompts]


@cache
def _limit() -> float:
    """Of the difference of log-probabilities: the rounding of a logit, and that of the logarithm of their sum."""
    limits, tokens = [], max(LENGTHS) + LIMITS.max_new_tokens
    for family in {cell.family for cell in LAYOUTS.values()} - {WIDE}:
        model = _plain(family)
        for prompt in prompts_of(LENGTHS):
            with torch.no_grad():
                logits = model(torch.tensor([prompt.ids]), use_cache=False).logits
            limits.append(2 * rounding_of_outputs(model.config, logits, tokens=tokens))
    return max(limits)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_wide(folder)
    for family in {cell.family for cell in LAYOUTS.values()} - {WIDE}:
        _plain(family).save_pretrained(folder / family)
    return folder


@pytest.fixture(scope="module", params=RUNS)
def ranks(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def found(ranks: int, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What so many ranks sampled in each of their layouts."""
    out = tmp_path_factory.mktemp("sampled") / "found.json"
    worker = Path(__file__).with_name("worker.py")
    done = start(torchrun(str(worker), str(models), str(out), *RUNS[ranks], ranks=ranks))
    assert done.returncode == 0, done.stderr[-4000:]
    assert ("each token gathers the weights layer by layer" in done.stderr) == (ranks == 2)
    return dict(json.loads(out.read_text()))


def _answers(group: list[Any]) -> list[SampledAnswer]:
    return [SampledAnswer(np.array(ids), np.array(logps, dtype=np.float32), finish) for ids, logps, finish in group]


def test_answers_are_those_of_one_rank(found: dict[str, Any], ranks: int) -> None:
    assert set(found) == set(RUNS[ranks])
    for name, sampled in found.items():
        auto, small = ([_answers(group) for group in sampled[key]] for key in ("auto", "small"))
        wanted = auto if name in WITH_STEP else _wanted(LAYOUTS[name].family)
        for groups in (auto, small):
            for group, others in zip(groups, wanted, strict=True):
                for answer, other in zip(group, others, strict=True):
                    assert_same(answer, other, within=_limit())
    assert {len(answer.ids) for group in _wanted("llama") for answer in group} > {8}


def test_log_probabilities_are_those_of_training(found: dict[str, Any]) -> None:
    for name, sampled in found.items():
        assert sampled["training"] <= 1e-4, name


def test_experts_are_those_of_training_unless_routers_have_other_weights(found: dict[str, Any], ranks: int) -> None:
    routed = {name: sampled["experts"] for name, sampled in found.items() if sampled["experts"]}
    assert routed.keys() >= {"zero3", "lora", "zero0", "ep", "tp-zero3"} & set(RUNS[ranks])
    for name, (same, *others) in routed.items():
        assert same == 0, name
        assert all(0.1 < other <= 1 for other in others), name
    assert ranks == 3 or len(routed["zero0"]) == 2
