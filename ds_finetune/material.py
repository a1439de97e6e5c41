"""What a run is made of, gathered on every process before any process group exists: model config, tokenizer, tokenised rows."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ds_finetune.arch import Shape
from ds_finetune.config import RunConfig
from ds_finetune.data.prepare import PreparedRows, TokenSpec, prepare
from ds_finetune.data.stream import StreamedRows, stream
from ds_finetune.data.tokenizer_files import load_tokenizer
from ds_finetune.errors import ConfigError
from ds_finetune.model.build import read_hf_config, resolve_folder
from ds_finetune.model.generic_check import check_generic_type
from ds_finetune.model.weights import weights_digest
from ds_finetune.schedule import Duration


@dataclass(frozen=True)
class Material:
    """Model folder and config, tokenizer, training and held-out rows; `shape` is None for model types arithmetic does not know."""

    folder: Path
    hf_config: PretrainedConfig
    shape: Shape | None
    tokenizer: PreTrainedTokenizerBase
    tokenizer_folder: Path
    train: PreparedRows | StreamedRows
    held_out: PreparedRows | None
    base: str = ""
    """Digest of the weights that adapters are trained on; empty where there are none."""

    @property
    def pad_token_id(self) -> int:
        """Id that fills rows; it carries no loss, so any id will do where the tokenizer names none."""
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id or 0)

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end an answer: the model's and the tokenizer's end of sequence."""
        given = self.hf_config.eos_token_id
        ids = list(given) if isinstance(given, list) else [given]
        return sorted({int(i) for i in (*ids, self.tokenizer.eos_token_id) if i is not None})


def gather_material(config: RunConfig) -> Material:
    """Read the model's config and tokenizer and tokenise the data; ModelError, DataError or ConfigError say what is wrong with them."""
    folder = resolve_folder(config.model.path)
    hf_config = read_hf_config(config.model.path)
    tokenizer_folder = resolve_folder(config.model.tokenizer) if config.model.tokenizer else folder
    tokenizer = load_tokenizer(str(tokenizer_folder))
    spec = token_spec(config, hf_config)
    if config.data.streaming and Duration.parse(config.train.duration).unit != "steps":
        raise ConfigError(f"data.streaming does not know how long `{config.train.duration}` is", hint="give train.for in steps")
    return Material(
        folder=folder,
        hf_config=hf_config,
        shape=_shape(folder),
        tokenizer=tokenizer,
        tokenizer_folder=tokenizer_folder,
        train=(stream if config.data.streaming else prepare)(config.data, "train", tokenizer=tokenizer, spec=spec),
        held_out=prepare(config.data, "eval", tokenizer=tokenizer, spec=spec) if config.data.eval else None,
        base=weights_digest(folder) if config.lora is not None else "",
    )


def try_generic_type(config: RunConfig, hf_config: PretrainedConfig) -> tuple[str, ...]:
    """Lines on what a generic model type did on a tiny copy; ModelError where it would be trained wrongly."""
    return check_generic_type(
        hf_config,
        attention=config.model.attention,
        packing=config.data.packing,
        row_tokens=config.train.max_seq_len,
        precision=config.train.precision,
    )


def token_spec(config: RunConfig, hf_config: PretrainedConfig) -> TokenSpec:
    """The numbers of the model that rows must respect; ConfigError where `max_seq_len` is more than the model allows."""
    allowed = getattr(hf_config, "max_position_embeddings", None)
    if allowed and config.train.max_seq_len > allowed:
        raise ConfigError(
            f"train.max_seq_len {config.train.max_seq_len} is more than the {allowed} positions of {config.model.path}",
            hint=f"set train.max_seq_len to {allowed} or less",
        )
    return TokenSpec(max_seq_len=config.train.max_seq_len, vocab_size=hf_config.vocab_size, max_positions=allowed)


def _shape(folder: Path) -> Shape | None:
    try:
        return Shape.of(folder)
    except ConfigError:
        return None
