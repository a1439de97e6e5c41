"""The sections of the run file: frozen pydantic models, in which an unknown key is an error."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from ds_finetune.config.schedule import Interval, seconds_of
from ds_finetune.config.section import Section
from ds_finetune.config.value_types import (
    DurationText,
    EveryText,
    HeldOutPaths,
    Layout,
    MicroBatchSize,
    SizeText,
    StepsText,
    TimeText,
    WeightedPaths,
    as_list,
    check_time,
)

Precision = Literal["bf16", "fp16", "fp32"]
OWN_ATTENTIONS = ("sdpa", "by_document", "varlen")
"""Values of `model.attention` that are this package's own in families of the table; the others are transformers'."""


class ModelConfig(Section):
    """Which model is trained; the short form `model: PATH` sets `path` alone."""

    path: str
    """Folder or hub id holding `config.json` and safetensors weights."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; the model's own when left out."""
    resize_vocabulary: bool = False
    """Add rows to embedding and head for a tokenizer with more ids than the model; false refuses such a tokenizer."""
    context: int | None = Field(default=None, ge=1)
    """Tokens of a document that the model must have positions for. More than its config.json has extend it by YaRN:
    positions and rotary scaling change together, also in exports, and a line says what that does to short texts.
    """
    weights: Literal["load", "random"] = "load"
    """`random` builds the model from `config.json` alone, with fresh weights; the plan says so."""
    attention: Literal["sdpa", "by_document", "varlen", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel; with `packing` each keeps the documents of a row apart. `by_document` makes a call for each
    document, `varlen` one for all documents of a forward, on GPUs in bf16 and fp16. `sdpa` is `varlen` where its kernel
    takes the model, and `by_document` elsewhere.
    """
    loss: Literal["auto", "chunked", "liger"] = "auto"
    """Loss kernel; `auto` is Liger's fused one on GPUs where liger-kernel is installed, the chunked one elsewhere."""


class DataConfig(Section):
    """What is trained on and how rows become tokens."""

    train: WeightedPaths
    """Training files, folders or hub ids (JSON, JSONL, CSV, Parquet, text); a split is named after a colon, as in
    `org/name:train` or `org/name:subset:train`. Left out, it is the training split. A mapping of them to weights, as in
    `{new.txt: 0.9, old.txt: 0.1}`, mixes their rows in these shares.
    """
    eval: HeldOutPaths = ()
    """Held-out files, folders or hub ids; where no split is named, it is the validation split, else the test split.
    Several sets are given by name, as in `{new: a.txt, old: b.txt}`; each has its own metrics, `eval/new/loss`.
    """
    layout: Layout = "auto"
    """Layout of a row; `auto` recognises it by its columns."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Other names of the layout's columns, e.g. `{prompt: question, completion: answer}`."""
    template: str = "auto"
    """`auto`: the tokenizer's chat template where it has one, plain text otherwise; `plain`: never; else a Jinja file.
    """
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Tokens that carry loss: every assistant turn, the last one alone, or every token."""
    reasoning: Literal["keep", "strip"] = "keep"
    """Whether `<think>...</think>` of an assistant turn stays in the text."""
    control_tokens: Literal["text", "keep", "refuse"] = "text"
    """Control tokens inside the texts of a conversation: tokenised as `text`, kept as control tokens, or refused."""
    separator: str = "\n"
    """Text between prompt and completion without a chat template, unless there is white space already; and between two
    texts with a label."""
    packing: bool = True
    """Fill rows of `max_seq_len` with several documents that cannot see each other; false pads each row instead."""
    long_rows: Literal["auto", "truncate", "drop", "split"] = "auto"
    """Rows longer than `max_seq_len`: cut at the end, leave out, or (plain text alone) continue in the next row;
    `auto` splits plain text and truncates all else. Both sides of a pair are cut to a common length.
    """
    bad_rows: Literal["error", "drop"] = "error"
    """Rows that cannot be read or tokenised: an error that lists them before the run, or left out, listed, and counted
    in `max_dropped_ratio`.
    """
    max_dropped_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of rows without a supervised token, too long, lost in the chat template, or dropped as bad, above which no
    run starts.
    """
    max_truncated_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of all tokens lost to truncation above which the run refuses to start."""
    streaming: bool = False
    """Read and tokenise while training, for data too large to prepare; `train.for` is then in steps."""
    shuffle: bool = True
    """Draw rows in an order given by (seed, epoch); false keeps the order of the files."""
    balance: bool = True
    """Divide the rows of a step over ranks and forwards by their cost, so that ranks wait little for each other; false
    keeps their order. The step's rows are the same.
    """
    workers: int = Field(default=0, ge=0)
    """Processes that tokenise; 0 takes every core of the machine."""
    cache_dir: str = ".cache/ds_finetune"
    """Folder of tokenised data, found again by fingerprint."""

    def paths(self, purpose: str) -> tuple[str, ...]:
        """All paths of `train` or `eval`, whatever form they are given in."""
        if purpose == "train":
            return tuple(self.train)
        return tuple(path for paths in self.held_out_sets.values() for path in paths)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each path of `train`; empty where all rows of all paths are used alike."""
        return self.train if isinstance(self.train, dict) else {}

    @property
    def held_out_sets(self) -> dict[str, tuple[str, ...]]:
        """Paths of each held-out set by the first part of its metric names: `eval`, or `eval/NAME` for named sets."""
        if isinstance(self.eval, dict):
            return {f"eval/{name}": paths for name, paths in self.eval.items()}
        return {"eval": self.eval} if self.eval else {}


class TrainConfig(Section):
    """How long, how much at a time and in which precision."""

    model_config = ConfigDict(populate_by_name=True)

    duration: DurationText = Field(default="1 epochs", alias="for")
    """Length of the run: `N steps`, `N epochs` or `N tokens`."""
    global_batch_size: int = Field(default=32, ge=1)
    """Rows of one optimizer step over all ranks (packed rows when packing)."""
    micro_batch_size: MicroBatchSize = 1
    """Rows of one forward on one rank; accumulation is derived. `auto` takes the most that fit into memory."""
    max_seq_len: int = Field(default=2048, ge=2)
    """Tokens of a row at most; a row has both sides of a pair of answers."""
    precision: Precision = "bf16"
    """Dtype of weights and activations; master weights and moments are fp32."""
    seed: int = Field(default=0, ge=0)
    """Seed of data order and of fresh weights."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Global norm the gradient is clipped to; 0 does not clip."""
    activation_checkpointing: bool = True
    """Recompute each decoder layer in backward instead of keeping its activations."""
    activation_offload: bool = False
    """Keep the inputs of recomputed layers in pinned host memory instead of on the GPU."""
    tiled_mlp: bool = False
    """Compute MLPs and routed experts for parts of the tokens by turns, so that what is within them is never held for
    all tokens; each is computed once more in backward.
    """
    max_skipped_steps: int = Field(default=5, ge=1)
    """Steps skipped in a row for a non-finite gradient after which the run ends."""
    reduction_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype in which gradients are summed over ranks and forwards; `auto` is that of `precision`, `fp32` in bf16 needs
    ZeRO-2 or 3. `bf16` in fp32 rounds what is sent, and the sum over forwards stays fp32.
    """
    reduction_every: Literal["auto", "step"] = "auto"
    """How often gradients are summed over ranks: `auto` leaves it to the ZeRO stage, 2 and 3 in every forward; `step`
    sums once, and each rank keeps gradients of all its weights until then.
    """


class GenerateConfig(Section):
    """Greedy answers to held-out prompts during evaluation, scored by exact match."""

    prompts: int = Field(default=0, ge=0)
    """Held-out prompts answered at each evaluation; 0 generates nothing."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Tokens of an answer at most."""


class EvalConfig(Section):
    """When held-out data is evaluated and what follows from it."""

    every: StepsText | None = None
    """`N steps` between evaluations; left out, only at the end."""
    limit: int = Field(default=0, ge=0)
    """Held-out rows evaluated at most, the first ones (packed rows when packing); 0 evaluates all."""
    generate: GenerateConfig = GenerateConfig()
    """Optional generation with exact match."""
    keep_best: bool = True
    """Keep the weights with the lowest eval loss in `export-best/`."""
    patience: int = Field(default=0, ge=0)
    """Evaluations without a lower loss after which the run ends early; 0 never does."""


class CheckpointConfig(Section):
    """When the state of the run is saved, and what a start resumes from."""

    every: EveryText = "500 steps or 15 minutes"
    """`N steps`, a time such as `15 minutes`, or both joined by `or`, of which the first to pass counts; the last step
    and a signal save too. `never` saves nothing at all.
    """
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    keep_best: bool = True
    """Also keep the checkpoint with the lowest eval loss."""
    max_failed: int = Field(default=3, ge=1)
    """Checkpoints in a row that may not be written, e.g. for a full disk, before the run ends; the run's last one may
    never.
    """
    resume: str = "auto"
    """`auto` resumes from the newest complete checkpoint of `output_dir`; `never` starts anew; else a run or checkpoint
    folder.
    """
    asynchronous: bool = True
    """Copy the state to host memory and write it while training continues; false writes it while training waits, and
    needs no such memory.
    """
    node_local: bool = False
    """Each node keeps its own ranks' parts in its own `output_dir`, where there is no shared file system."""

    @property
    def saves(self) -> bool:
        """Whether anything is saved."""
        return self.every != "never"

    @property
    def interval(self) -> Interval:
        """What lies between two checkpoints; infinite where nothing is saved."""
        return Interval.parse(self.every) if self.saves else Interval()


class LoraConfig(Section):
    """Low-rank adapters; with this section the model's weights stay unchanged and only the adapters are trained."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B; of routed experts a multiple of 8."""
    alpha: float = Field(default=32, gt=0)
    """The product B A is added times alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(as_list)] | None = None
    """Modules by last name such as `q_proj` or `experts`, or by regular expressions on full names; left out, all
    linear modules of attention, MLPs, shared and routed experts. The router is adapted where `gate` is named,
    embeddings and head never.
    """
    quantize: Literal["nf4"] | None = None
    """`nf4`: frozen weights of attention, dense MLPs and shared experts are held in four bits by bitsandbytes, whether
    adapted or not.
    """


class LogConfig(Section):
    """What is written while training beside `metrics.jsonl`."""

    every: int = Field(default=1, ge=1)
    """Steps between progress lines."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Trackers accelerate knows, by name: tensorboard, wandb, mlflow, ..."""


REPORT_SECONDS = 60.0
"""Time the watchdog needs after a limit expires to ask all ranks and end the run, on a lossy network too."""
_SPARE_SECONDS = 300.0
"""Added to the longest limit of the watchdog where `watchdog.collective` is `auto`."""


class WatchdogConfig(Section):
    """When a run that hangs is ended, and which rank counts as slow."""

    limit: Annotated[str, BeforeValidator(lambda text: text if text in ("auto", "never") else check_time(text))] = (
        "auto"
    )
    """Longest time of an optimizer step; `auto` is ten times the median of the last steps and a minute at least;
    `never` detects no hang.
    """
    start: TimeText = "30 minutes"
    """Longest time without a collective from loading to the end of the first step, which may compile."""
    other: TimeText = "30 minutes"
    """Longest time without a collective in evaluation and export, and of a save."""
    meet: TimeText = "2 hours"
    """How long a rank that has started waits for the others to start; preparing data has no limit."""
    collective: Annotated[str, BeforeValidator(lambda text: text if text == "auto" else check_time(text))] = "auto"
    """How long torch lets a rank wait in a collective; `auto` is five minutes more than the longest limit above."""
    straggler_ratio: float = Field(default=1.5, gt=1)
    """Time of the slowest rank over the median from which the progress line names it."""

    @property
    def longest_limit(self) -> float:
        """Seconds of the longest limit. One that is `auto` is not counted: the watchdog ends it `REPORT_SECONDS` before
        torch's.
        """
        given = [self.start, self.other, *([self.limit] if self.limit not in ("auto", "never") else [])]
        return max(map(seconds_of, given))

    @property
    def collective_seconds(self) -> float:
        """How long torch lets a rank wait in a collective of any process group."""
        return self.longest_limit + _SPARE_SECONDS if self.collective == "auto" else seconds_of(self.collective)


class ExportConfig(Section):
    """The Hugging Face folder written at the end."""

    at_end: bool = True
    """Write `export/` when training ends."""
    max_shard_size: SizeText = "5GB"
    """Size of one safetensors file at most."""
    verify: bool = True
    """Record logits of fixed prompts with each export, and compare the folder with them in a fresh process of plain
    transformers.
    """


class MtpConfig(Section):
    """Multi-token prediction: a layer after the last one that predicts the token after the next, from which servers
    draft tokens.
    """

    train: bool = False
    """Train the layer that the model is published with; false carries it to exports unchanged."""
    weight: float = Field(default=0.1, gt=0)
    """Weight of its loss beside that of the next token."""
    detach: bool = True
    """Its loss trains the layer alone: all other weights are the same bits as without it. False trains them too."""


class LaunchConfig(Section):
    """How `ds-finetune launch` supervises a run on its hosts; other launchers do not read it."""

    restarts: int = Field(default=0, ge=0)
    """Starts from the newest checkpoint after a rank or a host has failed, before the run is given up."""
    min_hosts: int | None = Field(default=None, ge=1)
    """Fewest hosts to resume with; left out, all of the hostfile. The global batch stays what it is."""
    wait_seconds: float = Field(default=600, ge=0)
    """How long a restart waits for hosts to come back where there are too few."""
    greeting_seconds: float = Field(default=30, gt=0)
    """How long a host has for its first message, with the start of ssh and Python; ssh tries to connect for two
    seconds less.
    """
    silent_seconds: float = Field(default=10, ge=3)
    """Seconds without a message after which a host is given up, and after which a host that hears nothing ends its
    ranks.
    """
