"""What an export of a classifier or reward model holds besides its weights: tokenizer files with which a pipeline makes
the tokens of training, and scores to verify it by.
"""

import sys
from functools import partial

import torch

from ds_finetune.data.layouts import LabelledText
from ds_finetune.data.units import encode_labelled
from ds_finetune.engine.engine import Engine
from ds_finetune.export.classifier_tokenizer import (
    ClassifierTokenizer,
    Encode,
    check_tokenizer,
    fit_tokenizer,
    with_padding,
)
from ds_finetune.export.folder import TOKENIZER_FILES
from ds_finetune.export.model_config import TOKENIZER_CONFIG
from ds_finetune.export.verify.record import PROMPT_TOKENS, TEXTS, ExportRecord, classifier_prompts
from ds_finetune.model.build.dtypes import PRECISION_DTYPES, dtype_name
from ds_finetune.model.build.encoder import encoder_of
from ds_finetune.trainer.prepare import PreparedRun

_LONGEST = 2 * PROMPT_TOKENS
"""Maximum number of tokens of a text whose scores are recorded."""


def adapt_tokenizer(run: PreparedRun) -> ClassifierTokenizer:
    """The tokenizer files of a run's export that differ from those of the run; none of a language model's.

    An encoder's tokenizer is the one of training. A reward model of dialogues scores what the chat template renders,
    which needs no further tokens.
    """
    inputs = run.inputs
    if inputs.model.task == "causal_lm":
        return ClassifierTokenizer({})
    files = {
        name: path for name in TOKENIZER_FILES if "/" not in name and (path := inputs.tokenizer_folder / name).is_file()
    }
    encode = _encode_of(run)
    if encode is None:
        text = with_padding(files, inputs.tokenizer, inputs.config_tree["pad_token_id"])
        return ClassifierTokenizer({TOKENIZER_CONFIG: text})
    adapt = fit_tokenizer if encoder_of(inputs.hf_config) is None else check_tokenizer
    return adapt(inputs.tokenizer, files, encode, config=inputs.config_tree)


def _encode_of(run: PreparedRun) -> Encode | None:
    """How a text becomes tokens in training; None where training renders dialogue with a chat template."""
    inputs, data = run.inputs, run.config.data
    has_template = data.template != "plain" and (data.template != "auto" or bool(inputs.tokenizer.chat_template))
    if inputs.model.objective.name == "reward" and has_template:
        return None
    return partial(_encode, run)


def _encode(run: PreparedRun, text: str, pair: str | None) -> list[int]:
    """The ids of a text without a limit, which a pipeline does not know."""
    sample = LabelledText(text, pair, 0.0)
    return encode_labelled(sample, run.inputs.tokenizer, run.config.data.separator, sys.maxsize)[0]


def record_scores(run: PreparedRun, engine: Engine, tokenizer: ClassifierTokenizer, *, step: int) -> ExportRecord:
    """Scores of fixed texts from the weights as they are now, after `step` steps; every rank takes part.

    The record has no scores where weights are in four bits, because the exported weights are not quantised. It has the
    texts themselves where `tokenizer`, which rank zero knows, makes the run's tokens of all of them.
    """
    inputs, encode = run.inputs, _encode_of(run)
    vocab_size, limit = int(inputs.hf_config.vocab_size), min(_LONGEST, run.config.train.max_seq_len)
    encoded = {} if encode is None else {text: encode(text, None) for text in TEXTS}
    short = {text: tuple(ids) for text, ids in encoded.items() if len(ids) < limit}
    ending = next((ids[-1:] for ids in short.values()), ())
    drawn = classifier_prompts(vocab_size, pad=inputs.hf_config.pad_token_id, ending=ending)
    prompts = (*drawn, *short.values())
    has_same_tokens = set(short) <= set(tokenizer.texts)
    scores = None if inputs.model.quantised else torch.cat(list(engine.logits(prompts))).flatten().cpu().numpy()
    return ExportRecord(
        base=str(inputs.folder.absolute()),
        dtype=dtype_name(PRECISION_DTYPES[run.plan.precision]),
        vocab_size=vocab_size,
        prompts=prompts,
        step=step,
        logits=scores,
        num_labels=int(inputs.hf_config.num_labels),
        texts=tuple(short) if has_same_tokens else (),
    )
