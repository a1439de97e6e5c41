"""Answers of a batch are those of one prompt at a time without a cache, by plain transformers."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ds_finetune.engine.sampling import answer_model
from ds_finetune.engine.sampling.answer_model import AnswerModel, check_cache
from ds_finetune.engine.sampling.answers import PromptToSample, SampledAnswer, SamplingLimits
from ds_finetune.engine.sampling.sampler import PromptPart, TokenChoice, check_answers, sample_parts
from ds_finetune.errors import ModelError, RunError
from ds_finetune.model.attention.by_document import BY_DOCUMENT
from ds_finetune.model.build.skeleton import build_skeleton
from ds_finetune.model.weights.load import initialise_weights
from ds_finetune.reference.selftest.cells import hf_config
from tests.engine.sampling.plain import ALLOWED, CPU, SEED, assert_same, plain_answer, prompts_of

LENGTHS = (9, 1, 17, 9, 2)
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "mixtral", "glm4_moe_lite")
LIMITS = SamplingLimits(12, (1, 2, 4), ALLOWED)


@cache
def _models(name: str, attention: str = "sdpa") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model as it is trained, and transformers' own with the same weights, which are large enough to differ."""
    ours = build_skeleton(hf_config(name), attention=attention, dtype=torch.float32, device="cpu").eval()
    initialise_weights(ours, seed=2)
    with torch.no_grad():
        for param in ours.parameters():
            param.mul_(3 if param.ndim > 1 else 1)
    plain = AutoModelForCausalLM.from_config(hf_config(name)).float().eval()
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def _sampled(
    lm: PreTrainedModel,
    prompts: Sequence[PromptToSample],
    samples: range,
    limits: SamplingLimits = LIMITS,
    *,
    greedy: bool = False,
) -> list[SampledAnswer]:
    model = AnswerModel(lm, CPU)
    parts = [PromptPart(prompt, samples, place * len(samples)) for place, prompt in enumerate(prompts)]
    drawing = TokenChoice(limits, None if greedy else SEED, CPU)
    found = sample_parts(model, sorted(parts, key=lambda part: part.length), drawing)
    return [found[place] for place in range(len(prompts) * len(samples))]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_of_mixed_lengths_is_one_prompt_at_a_time(name: str) -> None:
    ours, plain = _models(name)
    prompts = prompts_of(LENGTHS)
    answers = _sampled(ours, prompts, range(2))
    wanted = [plain_answer(plain, prompt, sample, LIMITS) for prompt in prompts for sample in range(2)]
    for answer, other in zip(answers, wanted, strict=True):
        assert_same(answer, other)
    assert len({len(answer.ids) for answer in answers}) > 1, "no row leaves before the others"
    alone = [_sampled(ours, [prompt], range(sample, sample + 1))[0] for prompt in prompts for sample in range(2)]
    for answer, other in zip(answers, alone, strict=True):
        assert_same(answer, other)


@pytest.mark.parametrize(
    ("name", "attention"),
    [("deepseek_v32_sparse", "sdpa"), ("glm_moe_dsa_sparse", "sdpa"), ("llama", "eager"), ("gpt_oss", "eager")],
)
def test_prompts_of_equal_length_share_a_batch_where_attention_takes_no_others(name: str, attention: str) -> None:
    ours, plain = _models(name, attention)
    assert not AnswerModel(ours, CPU).takes_mixed_lengths
    prompts = prompts_of(LENGTHS)
    answers = _sampled(ours, prompts, range(2))
    for place, prompt in enumerate(prompts):
        for sample in range(2):
            assert_same(answers[2 * place + sample], plain_answer(plain, prompt, sample, LIMITS))


def test_greedy_answers_are_those_of_generate() -> None:
    ours, plain = _models("deepseek_v3")
    prompts, limits = prompts_of(LENGTHS), SamplingLimits(12, (1, 2, 4))
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": [1, 2, 4], "pad_token_id": 0}
    for prompt, answer in zip(prompts, _sampled(ours, prompts, range(1), limits, greedy=True), strict=True):
        ids = torch.tensor([prompt.ids])
        out = plain.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert out[0, ids.shape[1] :].tolist() == answer.ids.tolist()
        assert_same(answer, plain_answer(plain, prompt, 0, limits, greedy=True))


def test_ids_that_are_not_allowed_are_never_drawn() -> None:
    """Log-probabilities are those of the distribution over the others."""
    ours, plain = _models("qwen3")
    allowed = torch.arange(hf_config("qwen3").vocab_size) % 3 > 0
    limits = SamplingLimits(12, (), allowed & (torch.arange(len(allowed)) < 50))
    prompts = prompts_of(LENGTHS)
    answers = _sampled(ours, prompts, range(2), limits)
    assert all(allowed[answer.ids].all() and answer.ids.max() < 50 for answer in answers)
    for place, prompt in enumerate(prompts):
        assert_same(answers[2 * place], plain_answer(plain, prompt, 0, limits))


def test_a_stop_of_the_text_ends_an_answer() -> None:
    ours, plain = _models("llama")
    limits = SamplingLimits(12, (), ALLOWED, stops=lambda ids: ids[-1] % 5 == 0 and len(ids) > 2)
    prompts = prompts_of(LENGTHS)
    answers = _sampled(ours, prompts, range(2), limits)
    assert {answer.finish for answer in answers} == {"stop", "length"}
    for place, prompt in enumerate(prompts):
        assert_same(answers[2 * place], plain_answer(plain, prompt, 0, limits))


def test_answers_may_end_at_once() -> None:
    ours, _ = _models("llama")
    prompts = prompts_of(LENGTHS)
    every = _sampled(ours, prompts, range(4), SamplingLimits(12, (), ALLOWED))
    first = int(every[0].ids[0])
    ended = _sampled(ours, prompts, range(4), SamplingLimits(12, (first,), ALLOWED))
    assert ended[0].ids.tolist() == [first]
    assert ended[0].finish == "stop"
    for answer, whole in zip(ended, every, strict=True):
        assert answer.ids.tolist() == whole.ids[: len(answer.ids)].tolist()
    cut = _sampled(ours, prompts, range(4), SamplingLimits(1, (), ALLOWED))
    assert [answer.ids.tolist() for answer in cut] == [answer.ids[:1].tolist() for answer in every]
    assert {answer.finish for answer in cut} == {"length"}


END, PAD, OTHER = 1, 7, 9


@pytest.mark.parametrize(
    ("drawn", "stop_ids", "length", "finish"),
    [
        (END, (END, 2), 1, "stop"),
        (PAD, (END,), 3, "length"),
        (OTHER, (END,), 3, "length"),
        (PAD, (END, PAD), 1, "stop"),
    ],
    ids=["end", "pad", "neither", "pad that is the end"],
)
def test_an_answer_is_cut_where_its_last_token_is_no_end(
    drawn: int, stop_ids: tuple[int, ...], length: int, finish: str
) -> None:
    """A model that writes the pad token has not ended its answer, unless that is its end token."""
    ours, _ = _models("llama")
    only = torch.arange(hf_config("llama").vocab_size) == drawn
    for answer in _sampled(ours, prompts_of(LENGTHS), range(2), SamplingLimits(3, stop_ids, only)):
        assert (answer.ids.tolist(), answer.finish) == ([drawn] * length, finish)


def test_an_answer_whose_last_possible_token_is_the_end_is_not_cut() -> None:
    ours, _ = _models("llama")
    prompts = prompts_of(LENGTHS)
    (free, *_) = _sampled(ours, prompts, range(1), SamplingLimits(4, (), ALLOWED))
    last = int(free.ids[-1])
    assert last not in free.ids[:-1], "another seed is needed"
    ended = [_sampled(ours, prompts, range(1), SamplingLimits(most, (last,), ALLOWED))[0] for most in (3, 4, 5)]
    assert [(len(answer.ids), answer.finish) for answer in ended] == [(3, "length"), (4, "stop"), (4, "stop")]


def _generic(kind: str, **keys: object) -> PreTrainedModel:
    config = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config, **keys)).float().eval()  # type: ignore[no-any-return]


def test_a_type_without_a_row_in_the_table_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """StarCoder2's window is shorter than the texts."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
    ours, plain = (_generic("starcoder2", **heads) for _ in range(2))
    ours.config._attn_implementation = BY_DOCUMENT
    check_cache(AnswerModel(ours, CPU))
    prompts = prompts_of(LENGTHS)
    for prompt, answer in zip(prompts, _sampled(ours, prompts, range(1)), strict=True):
        assert_same(answer, plain_answer(plain, prompt, 0, LIMITS))
    monkeypatch.setattr(answer_model, "_LIMITS", {torch.float32: 0.0})
    check_cache(AnswerModel(ours, CPU))
    with pytest.raises(ModelError, match="`starcoder2` cannot be sampled: with a cache its logits differ by"):
        check_cache(AnswerModel(plain, CPU))


def test_layers_with_another_state_are_refused_by_name() -> None:
    mamba = _generic("mamba", state_size=4)
    with pytest.raises(ModelError, match="`mamba` cannot be sampled: it has linear_attention"):
        check_cache(AnswerModel(mamba, CPU))


def test_logits_that_are_not_finite_are_an_error() -> None:
    ours, _ = _models("qwen2")
    embedding = ours.get_input_embeddings().weight
    assert isinstance(embedding, torch.nn.Parameter)
    kept = embedding.detach().clone()
    with torch.no_grad():
        embedding[5] = torch.nan
    answers = _sampled(ours, prompts_of(LENGTHS), range(1))
    with pytest.raises(RunError, match="token 1 of an answer cannot be sampled: logits are not finite"):
        check_answers(answers)
    with torch.no_grad():
        embedding.copy_(kept)
