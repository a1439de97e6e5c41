"""With which settings a multi-token prediction layer may be trained: those that tests compare with a plain loop."""

from collections.abc import Iterator, Sequence

from ds_finetune.config.objectives import cross_entropies
from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.plan.combinations import untested_training


def check_mtp(config: RunConfig, *, stage: int, offloads: Sequence[str]) -> None:
    """ConfigError where a multi-token prediction layer would be trained with settings that no test covers."""
    if not config.mtp.train:
        return
    for what, hint in _untested(config, stage, offloads):
        raise ConfigError(f"mtp.train true with {what} is not tested", hint=hint)


def _untested(config: RunConfig, stage: int, offloads: Sequence[str]) -> Iterator[tuple[str, str]]:
    if config.indexer.train:
        # No test compares both losses together; the indexer of the prediction layer has no loss.
        yield "indexer.train true", "train indexers first, and then mtp on the export of that run"
    if not config.objective.row.is_cross_entropy:
        legal = " or ".join(cross_entropies())
        yield f"objective {config.objective.name}", f"set objective to {legal}, or leave mtp out"
    if config.model.attention == "flash_attention_2":
        yield f"model.attention {config.model.attention}", "set model.attention to sdpa"
    if config.model.resize_vocabulary:
        yield "model.resize_vocabulary true", "use a tokenizer that fits the model"
    yield from untested_training(config, offloads)
    if stage == 0 and config.train.precision != "fp32":
        # DeepSpeed 0.19.8 takes the norm of all gradients there, also of parameters that are apart
        # (fp16/unfused_optimizer.py:214).
        yield f"zero stage {stage} in {config.train.precision}", "use zero stage 1, or fp32"
