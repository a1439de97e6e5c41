"""The sections of the run file: frozen pydantic models, in which an unknown key is an error."""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ds_finetune.config.run_file import SHORT_FORMS
from ds_finetune.config.schedule import Interval, SchedulerName, seconds_of
from ds_finetune.config.value_types import (
    DurationText,
    EveryText,
    FolderText,
    Free,
    HeldOutPaths,
    Layout,
    LengthText,
    MicroBatchSize,
    PathText,
    Refused,
    Rows,
    SizeText,
    TimeText,
    WarmupText,
    WeightedPaths,
    as_list,
    checked,
    share_of,
)

Precision = Literal["auto", "bf16", "fp16", "fp32"]
OWN_ATTENTIONS = ("sdpa", "by_document", "varlen")
"""Values of `model.attention` that this program implements for model types in `families/table.py`. transformers
implements the other values.
"""


class Section(BaseModel):
    """Base of all sections of the run file: frozen, and an unknown key is an error."""

    page: ClassVar[str] = "docs/reference/run-file.md"
    """Page of the documentation that describes the keys of the run file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def short_form(key: str) -> Callable[[object], object]:
    """Make a validator that expands a text to the section `{key: text}`."""
    return lambda value: {key: value} if isinstance(value, str) else value


def short_lora(value: object) -> object:
    """Expand `lora: true` to the default section, `false` to None, and a number to `{rank: number}`."""
    if isinstance(value, bool):
        return {} if value else None
    return {SHORT_FORMS["lora"]: value} if isinstance(value, int) else value


class ModelConfig(Section):
    """Which model is trained; `model: PATH` is short for `model: {path: PATH}`."""

    path: PathText
    """Folder or Hugging Face hub id of the model, with `config.json` and safetensors weights."""
    tokenizer: Rows[PathText | None] = None
    """Folder or hub id of the tokenizer; left out, the model's own."""
    resize_vocabulary: bool = False
    """Add rows to embedding and head for tokens that the model lacks; false refuses a tokenizer with such tokens."""
    context: int | None = Field(default=None, ge=1)
    """Number of positions that the model must have: the maximum tokens of a document. If config.json has fewer, YaRN
    extends them, also in exports.
    """
    weights: Literal["load", "random"] = "load"
    """`load` reads the weights of the folder. `random` initialises weights randomly, from `config.json` only."""
    attention: Literal["sdpa", "by_document", "varlen", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel. With every kernel, packed documents do not attend to each other. `by_document` makes one call
    for each document, `varlen` one call for all documents of a forward pass (GPUs in bf16 and fp16). `sdpa` is `varlen`
    where that supports the model, else `by_document`.
    """
    loss: Literal["auto", "chunked", "liger"] = "auto"
    """Loss kernel: Liger's, or one that computes logits in chunks. `auto` is `liger` on GPUs if it is installed."""
    kernels: Literal["auto", "torch", "liger", "compile"] = "auto"
    """Kernels of RMSNorm, rotary embedding and SwiGLU: those of Liger, of torch.compile (ZeRO 0 to 2), or of torch.
    `auto` takes the first of these three that runs on the GPU, and `torch` on a CPU; the plan gives the reason. `torch`
    also turns off FlashAttention 3 and the Triton kernel for matrix products of routed experts.
    """


class DataConfig(Section):
    """Training rows and held-out rows, and how they become tokens."""

    train: Rows[WeightedPaths]
    """Training files, folders or hub ids (JSON, JSONL, CSV, Parquet, text); a split follows a colon, as in
    `org/name:train` or `org/name:subset:train`, and is the training split by default. A mapping to weights, such as
    `{new.txt: 0.9, old.txt: 0.1}`, mixes rows of the files in these proportions. `data/*.jsonl` names all matches.
    """
    eval: HeldOutPaths = ()
    """Held-out files, folders or hub ids. Their split is by default `validation`, else `test`. Sets may have
    names, as in `{new: a.txt, old: b.txt}`, and then have metrics of their own, `eval/new/loss`. `5%` holds out that
    share of the training rows: one of each 20 consecutive rows, chosen by `train.seed`.
    """
    rows: Rows[int | None] = Field(default=None, ge=1)
    """Number of training rows to read, from the first file on, for a trial; left out, all rows."""
    layout: Rows[Layout] = "auto"
    """Layout of the rows; `auto` recognises it by their columns."""
    columns: Rows[dict[str, str]] = Field(default_factory=dict)
    """Names of the data's columns where the layout has other names, e.g. `{prompt: question, completion: answer}`."""
    template: Rows[PathText] = "auto"
    """`auto` uses the tokenizer's chat template, or plain text where it has none. `plain` never uses a template.
    `chatml`, `llama3`, `mistral` (7B v0.2) and `alpaca` are the published templates; the tokenizer must have their
    special tokens. Any other value is the path of a Jinja file.
    """
    train_on: Rows[Literal["assistant", "last_assistant", "all"]] = "assistant"
    """Tokens that the loss counts: those of every assistant turn, of the last one, or all tokens."""
    reasoning: Rows[Literal["keep", "strip"]] = "keep"
    """Whether the reasoning `<think>...</think>` of assistant turns is kept or stripped."""
    control_tokens: Rows[Literal["text", "keep", "refuse"]] = "text"
    """Whether control tokens such as `<|im_end|>` in messages are tokenised as text, stay control tokens (`keep`), or
    are an error (`refuse`).
    """
    separator: Rows[str] = "\n"
    """Text between prompt and completion where no chat template is used and no white space is there already. It also
    separates the two texts of a labelled pair.
    """
    packing: Rows[bool] = True
    """Fill each row of `max_seq_len` tokens with documents that cannot see each other; false pads rows instead."""
    long_rows: Rows[Literal["auto", "truncate", "drop", "split"]] = "auto"
    """Rows longer than `max_seq_len`: `truncate` cuts them at the end, `drop` leaves them out, `split` continues plain
    text in the next row. `auto` splits plain text and truncates all else. The sides of a pair are cut to a common
    length.
    """
    bad_rows: Free[Literal["error", "drop"]] = "error"
    """Rows that cannot be read or tokenised: `error` lists them and ends the run before it starts, `drop` leaves them
    out.
    """
    max_dropped_ratio: Free[float] = Field(default=0.1, ge=0, le=1)
    """Largest share of dropped rows with which a run starts. A row is dropped if it is bad, too long, not
    fully rendered by the chat template, or without a supervised token.
    """
    max_truncated_ratio: Free[float] = Field(default=0.1, ge=0, le=1)
    """Largest share of all training tokens that the truncation of long rows may lose."""
    streaming: Refused[bool] = False
    """Read and tokenise rows during training, for data too large to prepare; `train.for` must then be in steps."""
    shuffle: Refused[bool] = True
    """Shuffle rows by seed and epoch; false keeps the order of the files."""
    balance: Free[bool] = True
    """Divide the rows of a step over ranks and micro-batches by cost, so ranks wait less; false keeps their order."""
    workers: Free[int] = Field(default=0, ge=0)
    """Number of processes that tokenise; 0 is one per core."""
    cache_dir: Free[FolderText] = ".cache/ds_finetune"
    """Folder of tokenised data; later runs with the same data and settings read it instead of tokenising again."""

    def paths(self, purpose: str) -> tuple[str, ...]:
        """All paths of `train` or `eval`, which may be a list or a mapping."""
        if purpose == "train":
            return tuple(self.train)
        return () if self.held_out_share else tuple(path for paths in self.held_out_sets.values() for path in paths)

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each path of `train`; empty if `train` names no weights."""
        return self.train if isinstance(self.train, dict) else {}

    @property
    def held_out_share(self) -> Fraction:
        """The fraction of the rows of `train` that is held out; 0 where `eval` names files or nothing."""
        return share_of(self.eval)

    @property
    def held_out_sets(self) -> dict[str, tuple[str, ...]]:
        """Paths of each held-out set. Keys are the prefixes of metric names: `eval`, or `eval/NAME` for named sets."""
        if isinstance(self.eval, dict):
            return {f"eval/{name}": paths for name, paths in self.eval.items()}
        return {"eval": self.eval} if self.eval else {}


class TrainConfig(Section):
    """Length, batch sizes and precision of training."""

    model_config = ConfigDict(populate_by_name=True)

    duration: DurationText = Field(default="1 epochs", alias="for")
    """Length of the run: `N steps`, `N epochs` or `N tokens`."""
    global_batch_size: Refused[int] = Field(default=32, ge=1)
    """Rows of an optimizer step over all ranks (packed rows with `data.packing`). For `grpo` it is
    rollout.prompts_per_step x objective.group_size, which is also the default.
    """
    micro_batch_size: MicroBatchSize = 1
    """Rows of one forward pass on one rank; gradient accumulation follows from it. `auto` is the most that fits memory.
    """
    max_seq_len: Rows[int] = Field(default=2048, ge=2)
    """Maximum tokens of a row; for pairs, of both sides together."""
    precision: Precision = "auto"
    """Dtype of weights and activations; master weights and moments are fp32. `auto` is bf16 where the device computes
    it (GPUs from compute capability 8.0, CPUs with AMX or AVX512-BF16), fp32 on other CPUs, and an error on other GPUs.
    """
    seed: Refused[int] = Field(default=0, ge=0)
    """Seed of the order of rows and of randomly initialised weights."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Norm to which the gradient of all parameters is clipped; 0 does not clip."""
    activation_checkpointing: Literal["auto", "full", "selective", "none"] = "auto"
    """What backward recomputes to save memory. `full`: each layer from its input. `selective`: each layer, but not
    attention, matrix products of routed experts, or the exchange of their tokens between ranks. `none`: nothing. `auto`
    is `selective` if that fits the GPUs by the estimate, else `full`. Results do not depend on it.
    """
    activation_offload: Free[bool] = False
    """Keep the inputs of recomputed layers in pinned host memory instead of on the GPU."""
    tiled_mlp: bool = False
    """Compute MLPs and routed experts for a part of the tokens at a time, and again in backward, to save memory with
    long rows.
    """
    only: Annotated[Refused[tuple[str, ...]], BeforeValidator(as_list)] = ()
    r"""Parameters that are trained: the last part of a module's name such as `experts` or `lm_head`, a full name, or a
    regular expression on either such as `model\.layers\.3\..*`. Left out, all parameters are trained.
    """
    freeze: Annotated[Refused[tuple[str, ...]], BeforeValidator(as_list)] = ()
    """Parameters that are not trained, named as in `only`; they are in no optimizer state, norm or checkpoint."""
    max_skipped_steps: Free[int] = Field(default=5, ge=1)
    """Number of consecutive steps with a non-finite gradient after which the run ends. In the first 100 steps of fp16,
    while the loss scale falls, the number is at least 17.
    """
    reduction_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype in which gradients are summed over ranks and micro-batches. `auto` is the dtype `precision`. `fp32` in a
    bf16 run needs ZeRO-2 or 3. `bf16` in an fp32 run rounds gradients that are sent; the sum over micro-batches stays
    fp32.
    """
    reduction_every: Literal["auto", "step"] = "auto"
    """How often gradients are summed over ranks. With `auto` ZeRO stages 2 and 3 sum for every micro-batch, 0 and 1
    once a step. `step` sums once a step at every stage; until then each rank holds the gradients of all its weights.
    """


_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """Optimizer and learning rate."""

    name: Refused[str] = "AdamW"
    """Optimizer: DeepSpeed's AdamW (Adam is the same), Lion, Adagrad, Lamb, SGD or Muon (with AdamW for embedding, head
    and vectors), torch's RAdam, Adamax, RMSprop or Adafactor, or AdamW8bit of bitsandbytes. Adafactor multiplies
    `lr` by the root mean square of each parameter, so it needs a larger `lr`. AdamW8bit and Adafactor need ZeRO-0.
    """
    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate, which is reached at the last step of `warmup`, or at the first step without warm-up."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    """Decay rates of the two moments of Adam and Lion."""
    eps: float = Field(default=1e-8, gt=0)
    """Number added to the denominator of Adam's update."""
    lr_scheduler: SchedulerName = "cosine"
    """Shape of the learning rate after warm-up. `wsd` stays at `lr` and decays in the last tenth of the run.
    `exponential_rise`, which `sweep --lr-range` uses, rises to `lr` without warm-up.
    """
    warmup: WarmupText = "3%"
    """Length of the linear warm-up: `N steps`, or a share of the run such as `3%`, rounded up."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end of the run, as a fraction of `lr`; with `exponential_rise` the one at the beginning,
    which must be above 0.
    """

    @model_validator(mode="after")
    def _has_a_first_rate(self) -> "OptimConfig":
        if self.lr_scheduler == "exponential_rise" and not self.min_lr_ratio:
            raise ValueError("min_lr_ratio is 0: with exponential_rise it should be above 0")
        return self


class GenerateConfig(Section):
    """Greedy answers to held-out prompts during evaluation, scored by exact match."""

    prompts: int = Field(default=0, ge=0)
    """Number of held-out prompts that the model answers at each evaluation."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum tokens of an answer in an evaluation."""


class EvalConfig(Section):
    """Evaluation of held-out data: its interval, the best weights, and an early end of the run."""

    every: LengthText | None = None
    """`N steps` or `N epochs` between evaluations; an evaluation that is due within a step follows that step. Left out,
    the only evaluation is at the end of the run.
    """
    limit: int = Field(default=0, ge=0)
    """Number of held-out rows (packed rows with `data.packing`) to evaluate, from the first on; 0 is all."""
    generate: GenerateConfig = GenerateConfig()
    """Answers to held-out prompts, scored by exact match."""
    keep_best: bool = True
    """Export the weights with the lowest `eval/loss` to `export-best/`."""
    patience: int = Field(default=0, ge=0)
    """Number of evaluations without a lower loss after which the run ends early; 0 never ends it early."""

    @property
    def interval(self) -> Interval:
        """Interval between evaluations; infinite if the only evaluation is at the end."""
        return Interval.parse(self.every) if self.every else Interval()


class CheckpointConfig(Section):
    """When the state of the run is saved, and from which checkpoint it resumes."""

    every: EveryText = "500 steps or 15 minutes"
    """Interval of saves: `N steps` or `N epochs`, a time such as `15 minutes`, or both joined by `or` for whichever is
    shorter. The last step and a signal save too. `never` saves nothing at all.
    """
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    keep_best: bool = True
    """Whether to keep the checkpoint with the lowest eval loss besides the newest ones."""
    max_failed: int = Field(default=3, ge=1)
    """The run ends with an error if this many checkpoints in a row, or its last one, cannot be written."""
    resume: PathText = "auto"
    """What a start resumes from: `auto` is the newest complete checkpoint of `output_dir`; `never` starts from the
    beginning; any other value is the folder of a run or checkpoint, used until this run has saved a checkpoint.
    """
    asynchronous: bool = True
    """Write checkpoints from a copy in host memory while training continues; false needs no copy."""
    node_local: bool = False
    """Each node stores the checkpoint files of its ranks in its own `output_dir`; for nodes without shared storage."""

    @property
    def saves(self) -> bool:
        """Whether checkpoints are saved."""
        return self.every != "never"

    @property
    def interval(self) -> Interval:
        """Interval between checkpoints; infinite if none is saved."""
        return Interval.parse(self.every) if self.saves else Interval()


class ParallelConfig(Section):
    """Degrees of tensor, pipeline, expert and sequence parallelism; data parallelism takes the remaining ranks."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel size: ranks over which each layer is divided by heads, MLP width and vocabulary."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallel size: number of stages, each of consecutive layers; `pp_layers` sets their sizes."""
    pp_layers: tuple[int, ...] = ()
    """Number of layers of each pipeline stage, such as [12, 16]. With `vpp`, list the chunks of layers in the model's
    order instead. Left out, all stages get about equally many parameters.
    """
    vpp: int = Field(default=1, ge=1)
    """Virtual pipeline size: number of chunks of layers on each pipeline rank. With more than one, ranks wait less and
    send more often.
    """
    ep: int = Field(default=1, ge=1)
    """Expert parallel size: data (and sequence) parallel ranks that divide the routed experts of each layer."""
    sp: int = Field(default=1, ge=1)
    """Sequence parallel size: ranks that share the tokens of each row. In attention each rank computes a part of the
    heads over full rows.
    """

    @property
    def axes(self) -> frozenset[str]:
        """Parallel axes with more than one rank (of pp, sp, tp and ep)."""
        return frozenset(axis for axis in ("pp", "sp", "tp", "ep") if getattr(self, axis) > 1)


def refused_values(**reasons: str) -> BeforeValidator:
    """Make a validator that refuses certain values of a key; `reasons` maps each of them to its error message."""

    def check(value: object) -> object:
        if reason := reasons.get(str(value).lower()):
            raise ValueError(reason)
        return value

    return BeforeValidator(check)


ALL_LINEAR = ("all-linear", "all")
"""Values of `target_modules` in peft and LLaMA-Factory that stand for all linear modules but the head."""


class LoraConfig(Section):
    """Low-rank adapters; with this section the model's weights stay unchanged and only the adapters are trained."""

    rank: int = Field(default=16, ge=1)
    """Rank of each adapter, whose matrices are A and B; for routed experts it must be a multiple of 8."""
    alpha: float = Field(default=32, gt=0)
    """Scale of adapters: the product B A is multiplied by alpha / rank before it is added to a weight."""
    rslora: bool = False
    """Multiply an adapter's product by alpha / sqrt(rank) instead of alpha / rank (rsLoRA)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is dropped in training; the frozen weights get all inputs."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1), BeforeValidator(as_list)] | None = None
    """Modules to adapt, by the last part of their names such as `q_proj` or `experts`, or by regular expressions on
    full names. Left out, all linear modules of attention, MLPs, shared and routed experts are adapted. `all-linear`, as
    in peft, or `gate` adapts routers too. Embeddings and head are never adapted.
    """
    quantize: Literal["nf4"] | None = None
    """`nf4` holds frozen weights of attention, dense MLPs and shared experts in four bits, by bitsandbytes (QLoRA)."""
    modules_to_save: Annotated[tuple[str, ...], BeforeValidator(as_list)] = ()
    """Modules that are trained in full beside the adapters, such as `embed_tokens`, `lm_head` or norms, named as in
    `target_modules`.
    """
    start: PathText | None = None
    """Folder of an adapter in peft's format from which training starts; it must have the modules, rank and scale of
    this section. Left out, A is random and B is zero.
    """

    @property
    def scale(self) -> float:
        """Factor of an adapter's product B A: alpha / rank, or with rsLoRA alpha / sqrt(rank)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class MtpConfig(Section):
    """Multi-token prediction: a layer after the last one predicts the token after the next. Servers use this layer for
    speculative decoding.
    """

    train: Refused[bool] = False
    """Train the multi-token prediction layer that the model is published with; false exports it unchanged."""
    weight: float = Field(default=0.1, gt=0)
    """Weight of the prediction layer's loss; the loss of the next token has weight 1."""
    detach: Refused[bool] = True
    """Whether the prediction layer's loss trains only that layer; other weights then have the same bits as without the
    loss.
    """


class RouterConfig(Section):
    """How routers, which choose the experts of a token, are trained. Left out, they are trained like all weights."""

    train: Refused[bool] = True
    """Whether the weights of routers are trained; false freezes them."""
    balance: float = Field(default=0.0, ge=0)
    """Weight of the balance loss, which is 1 for a layer whose experts are chosen equally often."""
    bias_update: float = Field(default=0.0, ge=0)
    """Number by which an expert's router bias changes after each step: down if the expert was chosen more often than
    the mean, else up.
    """


class IndexerConfig(Section):
    """Indexers of DeepSeek sparse attention, which choose the tokens that a query attends to."""

    train: Refused[bool] = False
    """Train indexers to score tokens as attention weighs them; false freezes indexers."""
    stage: Refused[Literal["sparse", "dense_warmup"]] = "sparse"
    """`sparse` trains indexers and the other weights, with attention to the chosen tokens. `dense_warmup` trains only
    indexers, with attention to all earlier tokens.
    """
    weight: float = Field(default=1.0, gt=0)
    """Weight of the indexers' loss; it hardly matters with Adam, which normalises gradients."""


_NO_SGLANG = refused_values(sglang="SGLang is not supported; vllm is, and own needs no server")


def _check_address(text: object) -> object:
    if text is not None and not re.fullmatch(r"https?://[^/\s]+/?", str(text)):
        raise ValueError("it should be an address such as http://127.0.0.1:8000")
    return text


class RolloutConfig(Section):
    """How answers are sampled while the model trains, for `objective: grpo`."""

    engine: Annotated[Literal["own", "vllm"], _NO_SGLANG] = "own"
    """What samples answers: `own` is the model under training, `vllm` a vLLM server. For a server, the run writes an
    export to output_dir before each rollout and evaluation, and removes it once the server has loaded it.
    """
    address: Annotated[Free[str | None], BeforeValidator(_check_address)] = None
    """Address of the vLLM server, such as http://127.0.0.1:8000."""
    prompts_per_step: Refused[int] = Field(default=32, ge=1)
    """Prompts per optimizer step. Their sampled answers are the step's global batch."""
    steps_per_rollout: Refused[int] = Field(default=1, ge=1)
    """Optimizer steps per rollout. All answers of a rollout are sampled with the weights before its first step."""
    ahead: Refused[Literal[0, 1]] = 0
    """Number of rollouts that are sampled ahead. With 1, the next rollout is sampled before the steps of the current
    one (`engine: own`) or during them (`vllm`), and its answers are scored during them. `objective.mismatch` corrects
    for the change of weights.
    """
    max_new_tokens: int = Field(default=256, ge=1)
    """Maximum tokens of a sampled answer; a longer answer is cut."""
    temperature: Refused[float] = Field(default=1.0, gt=0)
    """Temperature of sampling; only 1 is supported."""
    stop: Annotated[Refused[tuple[str, ...]], BeforeValidator(as_list)] = ()
    """Texts that end an answer, besides the model's end token; rewards see the text before them."""
    eval_samples: int = Field(default=0, ge=0)
    """Number of answers to each held-out prompt that are sampled for `eval/pass_at_K`, beside the greedy one."""
    batch_rows: Free[Annotated[int, Field(ge=1)] | Literal["auto"]] = "auto"
    """Number of answers that a rank samples at a time; `auto` is as many as fit into memory."""


class LogConfig(Section):
    """Progress lines and trackers of a run, beside `metrics.jsonl`."""

    every: int = Field(default=1, ge=1)
    """Steps between progress lines in `log.txt`; standard output has at most one line every `log.seconds`."""
    seconds: float = Field(default=5.0, ge=0)
    """Minimum seconds between progress lines on standard output; 0 prints all. Evaluations, notices and the last step
    are always printed.
    """
    verbose: bool = False
    """Also print lines that are otherwise only in `log.txt`: kernels, rewritten keys, and how exports were compared."""
    trackers: Annotated[tuple[str, ...], BeforeValidator(as_list)] = ("tensorboard",)
    """Experiment trackers by their names in accelerate: tensorboard, wandb, mlflow, ..."""
    observers: Annotated[tuple[str, ...], BeforeValidator(as_list)] = ()
    """Names of observers from installed packages. An observer gets the record of every step and may end the run."""


_PROFILED = re.compile(r"(\d+)(?:-(\d+))?")


def step_range(text: str) -> tuple[int, int]:
    """Parse `10-12` or `10` to the first and last step; ValueError unless it is a range of steps from 1 on."""
    match = _PROFILED.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ValueError(f"`{text}` is not a range of steps; write `10-12`, or `10` for a single step")
    first, last = int(match[1]), int(match[2] or match[1])
    if first < 1:
        raise ValueError(f"`{text}` begins at step {first}, and steps count from 1")
    if last < first:
        raise ValueError(f"`{text}` ends at step {last} and begins at step {first}; write `{last}-{first}`")
    return first, last


def _as_ranks(value: object) -> object:
    if value == "all":
        return value
    ranks = value if isinstance(value, list | tuple) else [value]
    if not ranks or any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in ranks):
        raise ValueError("it should be `all`, a rank such as 0, or a list of ranks")
    return tuple(sorted(set(ranks)))


class ProfileConfig(Section):
    """Steps whose time is recorded and broken down (docs/how-to/timeline.md). Left out, none is recorded."""

    steps: Annotated[str, checked(step_range)]
    """First and last step to profile, as in `10-12`, or a single step."""
    ranks: Annotated[Literal["all"] | tuple[int, ...], BeforeValidator(_as_ranks)] = "all"
    """Ranks that are profiled: `all`, one or a list. Only `all` shows how long ranks wait for the slowest one."""

    @property
    def first_and_last(self) -> tuple[int, int]:
        """First and last profiled step."""
        return step_range(self.steps)


REPORT_SECONDS = 60.0
"""Seconds that the watchdog needs after a limit expires to ask all ranks and end the run, even on a lossy network."""
_SPARE_SECONDS = 300.0
"""Seconds added to the longest limit of the watchdog where `watchdog.collective` is `auto`."""


class WatchdogConfig(Section):
    """When a run that hangs is ended, and which rank counts as slow."""

    limit: Annotated[str, checked(seconds_of, "auto", "never")] = "auto"
    """Longest time of an optimizer step, after which the run counts as hung. `auto` is ten times the median of the last
    steps, at least a minute; `never` detects no hang.
    """
    start: TimeText = "30 minutes"
    """Longest time without a collective from loading the model to the end of the first step, which may compile."""
    other: TimeText = "30 minutes"
    """Longest time without a collective in evaluation and export, and longest time of a save."""
    meet: TimeText = "2 hours"
    """Longest time that a rank waits for the others to start; preparing data has no limit."""
    collective: Annotated[str, checked(seconds_of, "auto")] = "auto"
    """Longest time of a collective, after which torch ends the process; `auto` is five minutes more than the longest of
    `limit`, `start` and `other`.
    """
    straggler_ratio: float = Field(default=1.5, gt=1)
    """The progress line names the slowest rank if its step time is at least this many times the median of all ranks."""

    @property
    def longest_limit(self) -> float:
        """Longest limit of the watchdog in seconds. A `limit` of `auto` does not count, because it expires
        `REPORT_SECONDS` before torch's timeout.
        """
        given = [self.start, self.other, *([self.limit] if self.limit not in ("auto", "never") else [])]
        return max(map(seconds_of, given))

    @property
    def collective_seconds(self) -> float:
        """Timeout in seconds of torch's process groups."""
        return self.longest_limit + _SPARE_SECONDS if self.collective == "auto" else seconds_of(self.collective)


class ExportConfig(Section):
    """Exports of the trained model for other programs, written at the end of the run."""

    at_end: bool = True
    """Export the model to `export/` when training ends."""
    formats: Annotated[tuple[str, ...], BeforeValidator(as_list)] = ("safetensors",)
    """Formats of the exports at the end of the run. `safetensors` is written to `export/`, and other formats are
    converted from it to `export-NAME/`. `onnx` and `gguf` need the extras of the same names.
    """
    max_shard_size: SizeText = "5GB"
    """Largest size of a safetensors file of an export."""
    verify: bool = True
    """Reload each export in a new process with plain transformers, and compare its logits with those of the run."""


class LaunchConfig(Section):
    """How `ds-finetune launch` restarts a run on its hosts; other launchers ignore this section."""

    restarts: int = Field(default=0, ge=0)
    """How many times a run restarts from its newest checkpoint after a rank or a host has failed."""
    min_hosts: int | None = Field(default=None, ge=1)
    """Fewest hosts with which a restart resumes; left out, all hosts are needed. The global batch stays the same."""
    greeting_seconds: float = Field(default=30, gt=0)
    """Seconds within which a host must answer when a run starts; they include the start of ssh and Python."""
    silent_seconds: float = Field(default=10, ge=3)
    """A host that does not answer for this long has failed; a host that hears nothing for this long ends its ranks."""
