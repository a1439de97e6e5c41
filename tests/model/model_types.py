"""What every causal model type of transformers does here, as a table: `python -m tests.model.model_types >
docs/reference/model-types.md`.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig

from ds_finetune.errors import ModelError
from ds_finetune.families.table import BUILT_AS, FAMILIES
from ds_finetune.families.text_part import TEXT_CONFIG
from ds_finetune.model.build.generic_check import check_trial, try_model_type
from ds_finetune.model.build.skeleton import check_logits, check_vocabulary, model_class
from ds_finetune.model.build.text_config import check_text_part

ROW_TOKENS = 2048
"""`train.max_seq_len` of the table."""
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"] * 8},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
}
"""Settings of types whose default configuration cannot be built, or has not the kinds of layers that published models
have.
"""
_HEAD = """# Model types

This page lists the model types (`model_type` of config.json) that can be trained. Most need no settings; if a run is
refused, the error says what to set:

```yaml
model: {{path: my-bloom, attention: eager}}
data: {{train: chat.jsonl, packing: false}}
```

{families}
have rows in `ds_finetune/families/table.py`, and tests compare their losses and gradients with a reference loop. Every
other causal model type of transformers is *generic*: it is built as transformers builds it. Before training, and in
`ds-finetune plan`, a generic type is tried on the CPU in fp32: a tiny model with its `config.json` and random weights.
This takes about a second:

| tried | must be equal |
| --- | --- |
| packing | hidden states of two documents in one row, in both orders, and of each document by itself |
| padding | hidden states of a document with padding behind it, and without |
| loss | the loss of this program, and that of the model's own logits with transformers' plain attention |
| adapters, with `lora` | loss, gradients and logits with adapters, and with weights to which they are added |

The results of the trial are printed under the plan, and count as equal up to a relative difference of 1e-4. The run
ends with exit code 2 before anything is loaded if the loss differs, or if hidden states differ: those of packed rows if
the run packs, else those of padded rows.

If the tiny model of this trial cannot be built, a run that packs is refused; for a run without packing, a line under
the plan says that its loss is not known to be right.

The encoders `{encoders}` are families too. They attend in both directions and are trained
only with `objective: classification`. Tests compare each document of a packed row with the same document
alone in plain transformers.

[Sparse attention](../how-to/sparse-attention.md) (`deepseek_v32`, `glm_moe_dsa`) over documents longer than
`index_topk` is refused in three cases: with `model.attention: eager`, for teachers, and if the first layer of a
pipeline stage of GLM has no indexer.

`deepseek_v41` is refused, since transformers has no classes for it. Classifiers of `exaone`, `sarvam_mla` and
`sarvam_moe` are refused.

Gated delta nets (`qwen3_next`, `qwen3_5_moe_text`, `qwen3_5_text`) reset their state at each document of a packed row.
`grpo` cannot train these models, since it cannot sample answers from them.

A `config.json` with `output_router_logits: true` asks for transformers' balance loss and is refused; set
[`router.balance`](../how-to/routers.md) instead.

## Text parts

A model whose `config.json` has a section `text_config` also processes images, video or audio. Its text part is trained
as a model of the type that the section names, and only the text part needs memory. An export holds the complete model
with all other bytes unchanged, and is compared with the run on texts. With LoRA `adapter/` fits the complete model in
peft.

For models with a text part, rows with images, video or audio are refused, and also `model.weights: random`, quantised
weights, classifiers, and exports to GGUF, ONNX, compressed-tensors and server adapters. A type whose text part has no
causal LM in transformers, such as `qwen2_vl` or `glm5_next`, is refused too.

Of the types with a text part, tests train gemma3, gemma4, glm4v_moe, internvl, kimi_k25, llama4, minimax_m3_vl,
mistral3 (of mistral and mistral4), qwen3_5, qwen3_5_moe and qwen3_vl. Export a model of another type after a few steps
first, to see whether the export is verified.
A text part whose own type is refused below is refused too.

{trained}

## What each type allows

The lists below are for transformers {version}, its default configurations with {settings} (`SETTINGS` in
`tests/model/model_types.py`), `train.max_seq_len` {row_tokens} and `model.attention: sdpa`, or `eager` (marked) if there
is no other. A run tries your own `config.json`. This page is written by `python -m tests.model.model_types`.
"""


_HEADINGS = {
    "packs": "Types that pack",
    "refuses packing": "Types that need data.packing false",
    "refused": "Types that are refused",
}


@dataclass(frozen=True)
class Row:
    """One model type: the attention it was tried with, `packs`, `refuses packing` or `refused`, and why."""

    kind: str
    attention: str
    verdict: str
    why: str

    @property
    def name(self) -> str:
        return f"{self.kind} (eager)" if self.attention == "eager" else self.kind

    @property
    def reason(self) -> str:
        """The same words for every type, without the text of an exception."""
        text = self.why.replace(f"model_type `{self.kind}`", "the model type").removeprefix("config.json: ")
        return re.sub(r"(: | with )\w+Error: .*", "", text)


def config_of(kind: str, **settings: Any) -> PretrainedConfig:
    """The default configuration of a type, or one with the layers of published models."""
    return CONFIG_MAPPING[kind](**{**SETTINGS.get(kind, {}), **settings})


def attention_of(config: PretrainedConfig) -> str:
    return "sdpa" if model_class(config)._supports_sdpa else "eager"


def row_of(kind: str) -> Row:
    try:
        config = config_of(kind)
        attention = attention_of(config)
    except Exception as broken:  # noqa: BLE001 - whatever a default configuration raises
        return Row(
            kind, "-", "refused", f"its default configuration fails: {str(broken).strip().splitlines()[0][:100]}"
        )
    try:
        check_vocabulary(config, "config.json")
        check_logits(config, "config.json")
        trial = try_model_type(config, attention=attention, row_tokens=ROW_TOKENS)
        check_trial(kind, trial, packing=False)
    except ModelError as refused:
        return Row(kind, attention, "refused", _short(refused, kind))
    try:
        check_trial(kind, trial, packing=True)
    except ModelError as refused:
        return Row(kind, attention, "refuses packing", _short(refused, kind))
    return Row(kind, attention, "packs", "")


def _short(refused: ModelError, kind: str) -> str:
    """The reason without numbers, which differ between machines."""
    text = refused.message.removeprefix(f"model_type `{kind}`").removeprefix(": ").strip()
    return text.split(", relative difference")[0].split(" on a tiny copy")[0][:160]


def generic_types() -> Iterator[str]:
    mapping = AutoModelForCausalLM._model_mapping
    named = {*FAMILIES, *BUILT_AS}
    known = (kind for kind, config in sorted(CONFIG_MAPPING.items()) if config in mapping and kind not in named)
    return (kind for kind in known if TEXT_CONFIG not in CONFIG_MAPPING[kind].sub_configs)


def composite_types() -> list[str]:
    """Composite types whose text part can be trained."""
    trained = []
    mapping = AutoModelForMultimodalLM._model_mapping
    kinds = (kind for kind, config in sorted(CONFIG_MAPPING.items()) if config in mapping)
    for kind in (kind for kind in kinds if TEXT_CONFIG in CONFIG_MAPPING[kind].sub_configs):
        config = config_of(kind)
        try:
            check_text_part(config, {TEXT_CONFIG: {}}, "causal_lm", "config.json")
        except ModelError:
            continue
        trained.append(kind)
    return trained


def rows() -> list[Row]:
    return [row_of(kind) for kind in generic_types()]


def page(found: list[Row]) -> str:
    head = _HEAD.format(
        families=textwrap.fill(
            f"The families `{'`, `'.join(kind for kind, family in FAMILIES.items() if family.encoder is None)}`",
            120,
            break_on_hyphens=False,
        ),
        encoders="`, `".join(kind for kind, family in FAMILIES.items() if family.encoder is not None),
        version=transformers.__version__,
        settings=f"{len(SETTINGS)} exceptions",
        row_tokens=ROW_TOKENS,
        trained=textwrap.fill(
            f"Types with a text part are {', '.join(composite_types())}.", 120, break_on_hyphens=False
        ),
    )
    return head + "".join(_section(verdict, heading, found) for verdict, heading in _HEADINGS.items())


def _section(verdict: str, heading: str, found: list[Row]) -> str:
    """The types of a verdict, by reason."""
    reasons: dict[str, list[str]] = {}
    for row in found:
        if row.verdict == verdict:
            reasons.setdefault(row.reason, []).append(row.name)
    texts = [f"| {reason} | {', '.join(names)} |" for reason, names in reasons.items()]
    if "" in reasons:
        texts = [textwrap.fill(f"{heading} are {', '.join(reasons[''])}.", 120, break_on_hyphens=False)]
    head = ["| reason | model types |", "| --- | --- |"] if "" not in reasons else []
    return f"\n### {heading}: {sum(map(len, reasons.values()))}\n\n" + "\n".join([*head, *texts]) + "\n"


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    print(page(rows()), end="")  # noqa: T201
