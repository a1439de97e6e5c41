"""Settings that are refused where the model learns from answers that it samples."""

from ds_finetune.config.objectives import GrpoObjective, is_grpo
from ds_finetune.config.schedule import Duration
from ds_finetune.plan.settings import (
    UNTESTED_STATES,
    Condition,
    Conflict,
    MessageFields,
    ModelSettings,
    Refusal,
    RunSettings,
    refuse_pairs,
    setting,
)

_LAYOUTS = tuple(frozenset(axes.split()) for axes in ("", "tp", "sp", "ep"))
"""Axes besides data parallelism with which tests/parity/test_grpo.py compares the loss with a reference loop."""


def _refused(applies: Condition[RunSettings], message: str, hint: str) -> Refusal[RunSettings]:
    return Refusal(lambda run: is_grpo(run.objective) and applies(run), message, hint)


def _section(run: RunSettings) -> GrpoObjective:
    assert isinstance(run.objective, GrpoObjective)
    return run.objective


def _other_batch(run: RunSettings) -> MessageFields:
    size, prompts = _section(run).group_size, run.rollout.prompts_per_step
    answers, given = prompts * size, run.train.global_batch_size
    fitting = f"rollout.prompts_per_step to {given // size}, or " if given % size == 0 else ""
    return {"answers": answers, "fitting": fitting} if given != answers else None


def _unreached_length(run: RunSettings) -> MessageFields:
    for reward in run.rewards:
        least = (reward.max_tokens or 0) - reward.soft_tokens
        if reward.reward == "length" and least >= run.rollout.max_new_tokens:
            return {"reward": reward.shown_name, "least": least}
    return None


ROLLOUTS: tuple[Refusal[RunSettings], ...] = (
    _refused(
        _other_batch,
        "train.global_batch_size {train.global_batch_size} is not rollout.prompts_per_step "
        "{rollout.prompts_per_step} x objective.group_size {objective.group_size} = {answers}",
        "leave train.global_batch_size out; or set {fitting}train.global_batch_size to {answers}",
    ),
    _refused(
        lambda run: run.rollout.temperature != 1,
        "rollout.temperature {rollout.temperature:g}: answers would not be sampled from the distribution that is "
        "trained, and the ratio of their probabilities would be wrong from the first token on",
        "leave rollout.temperature out, which is 1",
    ),
    _refused(
        lambda run: run.rollout.max_new_tokens >= run.train.max_seq_len,
        "rollout.max_new_tokens {rollout.max_new_tokens} leaves no room for a prompt in a row of train.max_seq_len "
        "{train.max_seq_len}",
        "set train.max_seq_len to the length of the longest prompt plus rollout.max_new_tokens",
    ),
    _refused(
        lambda run: _section(run).ratio == "capped" and _section(run).ratio_cap is None,
        "objective.ratio capped without objective.ratio_cap",
        "set objective.ratio_cap, such as 5.0; it is the largest ratio itself, also where another program's "
        "epsilon_high is what the ratio may exceed 1 by",
    ),
    _refused(
        lambda run: _section(run).reference == "adapters_off" and run.lora is None,
        "objective.reference adapters_off without lora: there are no adapters to turn off",
        "add `lora`, or set objective.reference: none",
    ),
    _refused(
        lambda run: _section(run).reference == "start" and run.lora is not None,
        "objective.reference start with lora, whose adapters can be turned off",
        "set objective.reference: adapters_off, which keeps no second copy of the weights",
    ),
    _refused(
        lambda run: _section(run).kl_weight and not _section(run).has_reference(has_adapters=run.lora is not None),
        "objective.kl_weight {objective.kl_weight:g} without a reference model",
        "set objective.reference: start, add `lora`, whose reference is the model with its adapters off, or set "
        "objective.kl_weight to 0",
    ),
    _refused(
        lambda run: Duration.parse(run.train.duration).unit == "tokens",
        "train.for `{train.duration}`: how long the sampled answers will be is not known",
        "give train.for in steps, or in epochs of the prompts",
    ),
    _refused(
        lambda run: run.rollout.engine == "vllm" and run.rollout.address is None,
        "rollout.engine vllm without rollout.address",
        "add e.g. `address: http://127.0.0.1:8000`, the address of a vLLM server",
    ),
    _refused(
        lambda run: run.rollout.ahead and _section(run).mismatch == "none",
        "rollout.ahead {rollout.ahead} with objective.mismatch none: answers are sampled by weights of earlier steps, "
        "which nothing corrects",
        "set objective.mismatch: token, or rollout.ahead: 0",
    ),
    _refused(
        lambda run: run.rollout.ahead and _section(run).no_spread == "resample",
        "rollout.ahead {rollout.ahead} with objective.no_spread resample: the rewards, which decide which prompts are "
        "replaced, are computed while the steps that would need the new answers already run",
        "set objective.no_spread: drop, or rollout.ahead: 0",
    ),
    _refused(
        _unreached_length,
        "reward `{reward}` begins to fall after {least} tokens (max_tokens less soft_tokens), and "
        "rollout.max_new_tokens is {rollout.max_new_tokens}: no answer is long enough",
        "lower max_tokens, raise soft_tokens, or leave the reward out",
    ),
    *refuse_pairs(
        "objective grpo",
        lambda run: is_grpo(run.objective),
        (
            setting("mtp.train true", "set mtp.train: false"),
            setting("indexer.train true", "set indexer.train: false"),
            setting("data.streaming true", "set data.streaming: false"),
            setting("lora.quantize", "leave lora.quantize out"),
            Conflict("parallel {mesh}", "set one of parallel.tp, sp and ep only", lambda run: run.axes not in _LAYOUTS),
            UNTESTED_STATES[0],
            # ZenFlow counts forwards to know when to update all weights, but their number differs from step to step.
            Conflict("inexact option zenflow", "leave zenflow out", lambda run: "zenflow" in run.inexact),
        ),
    ),
    _refused(
        lambda run: not run.rewards,
        "objective {objective.name} without rewards: sampled answers have no score",
        "add e.g. `rewards: [exact_match]`",
    ),
)
"""Refusals for runs with sampled answers (rollouts) that need no config.json of the model."""


def _dropouts(model: ModelSettings) -> MessageFields:
    ends = ("dropout", "_pdrop", "_dropout_prob")
    drops = [f"{key} {value}" for key, value in model.config.items() if key.endswith(ends) and value]
    return {"drops": ", ".join(drops)} if drops else None


ROLLOUT_MODEL: tuple[Refusal[ModelSettings], ...] = (
    Refusal(
        lambda model: is_grpo(model.run.objective) and _dropouts(model),
        "objective grpo of a model with {drops}: answers would be sampled, scored and trained by different models",
        "set these keys to 0 in the model's config.json",
    ),
)
"""Checks of runs with sampled answers (rollouts) that need the model's config.json."""
