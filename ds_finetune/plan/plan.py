"""The plan of a run: everything computed from the run file before anything is loaded."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ds_finetune.config.objectives import ObjectiveConfig
from ds_finetune.config.sections import CheckpointConfig
from ds_finetune.errors import ConfigError
from ds_finetune.plan.batch import (
    AUTO,
    accumulation_steps,
    check_auto,
    idle_fraction,
    legal_micro_batches,
    rows_of_forward,
)
from ds_finetune.plan.checks import check
from ds_finetune.plan.deepspeed_config import (
    HAS_TORCH_ADAM,
    OPTIMIZERS,
    TORCH_ADAM,
    check_accelerate_agrees,
    choose_deepspeed,
    finish,
    read_choices,
    stage_of,
    turn_off_wrong_options,
    with_reduction_dtype,
)
from ds_finetune.plan.forward import TORCH_ONLY, Arch, attention_lines, experts_lines, head_line, mlp_tiles
from ds_finetune.plan.inexact import inexact_lines
from ds_finetune.plan.kernels import ChosenKernels, choose_kernels, triton_problem
from ds_finetune.plan.layer_stages import StageLayers
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.precision import WEIGHT_BYTES, with_precision
from ds_finetune.plan.settings import RunSettings, sections_of
from ds_finetune.system.versions import installed_version
from ds_finetune.system.world import AccelerateChoices, World

LIGER = "0.8.5"
"""liger-kernel version whose fused loss model/loss/cross_entropy.py calls; the function is private and may change."""


Recomputation = Literal["full", "selective", "none"]
"""Which operations of layers backward recomputes: a value of `train.activation_checkpointing` other than `auto`."""

_HIGH_RATE = 0.1
"""Learning rates from this value on get a note in the plan. SGD gets none, since its steps are proportional to the
gradient.
"""


@dataclass(frozen=True, kw_only=True)
class Plan(RunSettings):
    """Settings of a run with the decisions of `make_plan`, made before anything is loaded."""

    world: World
    loss_kernel: str
    kernels: ChosenKernels
    """Kernels that compute norms, rotary embeddings and SwiGLU, where the model has these operations."""
    later_lines: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Plan lines, as name and text, of decisions that are made after `make_plan`, such as decisions that depend on all
    ranks.
    """
    notes: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    """Names of the parameters that are not trained, because the run file freezes them or no loss reaches them. Exports
    have their initial values.
    """

    @property
    def decisions(self) -> tuple[tuple[str, str], ...]:
        """Lines of the plan and of plan.json that need no model: name and text of each decision."""
        return tuple((dict(_decisions(self)) | dict(self.later_lines)).items())

    @property
    def saves_asynchronously(self) -> bool:
        """Whether checkpoints are copied to host memory and written while training continues. Optimizer states on NVMe
        are written synchronously, since they may be larger than the host's memory.
        """
        return self.checkpoint.asynchronous and self.offload_optimizer != "nvme"

    @property
    def activation_checkpointing(self) -> Recomputation:
        """Recomputation of layers in backward. As long as `auto` is not resolved, it is `full`, which needs least
        memory.
        """
        chosen = self.train.activation_checkpointing
        return "full" if chosen == "auto" else chosen

    @property
    def recomputes(self) -> bool:
        """Whether backward recomputes some or all operations of layers."""
        return self.activation_checkpointing != "none"

    @property
    def home(self) -> Literal["gpu", "host"]:
        """Memory in which a rank computes: `gpu`, or `host` for CPU ranks."""
        return "host" if self.device == "cpu" else "gpu"

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight in the run's precision."""
        return WEIGHT_BYTES[self.precision]

    @property
    def dp(self) -> int:
        """Data parallel size."""
        return self.mesh.dp

    @property
    def legal_micro_batches(self) -> tuple[int, ...]:
        """Micro-batch sizes that are legal for the global batch, the ranks and the pipeline of the run, ascending."""
        # With interleaved pipeline stages, the number of forwards in a step must be a multiple of the number of stages.
        group = self.parallel.pp if self.parallel.vpp > 1 else 1
        return legal_micro_batches(global_batch_size=self.train.global_batch_size, dp=self.dp, group=group)

    @property
    def zero_ranks(self) -> int:
        """Number of ranks over which DeepSpeed averages gradients and shards states: dp x sp."""
        return self.mesh.dp * self.mesh.sp

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are accumulated locally and reduced once per step, although the ZeRO stage by default
        reduces them in each forward.
        """
        return self.train.reduction_every == "step" and self.zero_stage >= 2 and self.accumulation > 1

    @property
    def meets_each_forward(self) -> bool:
        """Whether data parallel ranks wait for each other in each forward or backward: ZeRO-2 and 3 reduce gradients
        there, ZeRO-3 gathers weights, and expert parallelism exchanges tokens.
        """
        reduces = self.zero_stage >= 2 and not self.reduces_once
        return reduces or self.zero_stage == 3 or self.mesh.ep > 1

    @property
    def is_engine_clipping(self) -> bool:
        """Whether this program's engine clips gradients and skips bad steps: DeepSpeed does neither at stage 0 in
        fp32.
        """
        return self.zero_stage == 0 and self.precision == "fp32"

    @property
    def checkpoint_bytes_per_parameter(self) -> float:
        """Bytes of a checkpoint per trained parameter: fp32 weight and optimizer state."""
        return 4 + OPTIMIZERS[self.optimizer].state_bytes

    @property
    def needs_fused_adam(self) -> bool:
        """Whether the optimizer uses DeepSpeed's FusedAdam, which nvcc has to compile."""
        if self.device == "cpu" or self.offload_optimizer != "none":
            return False
        optimizer = self.deepspeed_config["optimizer"]
        return optimizer["type"].lower() in HAS_TORCH_ADAM and not optimizer["params"].get("torch_adam")

    @property
    def may_take_torch_adam(self) -> bool:
        """Whether torch's fused AdamW may replace FusedAdam: not if the user has set `torch_adam` to false."""
        return self.needs_fused_adam and "torch_adam" not in self.deepspeed_config["optimizer"]["params"]

    def with_rows(self, rows: int) -> "Plan":
        """A copy of this plan with micro-batches of `rows` rows."""
        accumulation = self.train.global_batch_size // (rows * self.dp)
        sizes = {"train_micro_batch_size_per_gpu": rows, "gradient_accumulation_steps": accumulation}
        train, tree = self.train.model_copy(update={"micro_batch_size": rows}), self.deepspeed_config | sizes
        return replace(self, train=train, accumulation=accumulation, deepspeed_config=tree)

    def with_recomputation(self, chosen: Recomputation) -> "Plan":
        """A copy of this plan with `train.activation_checkpointing` set to `chosen`."""
        return replace(self, train=self.train.model_copy(update={"activation_checkpointing": chosen}))

    def with_lines(self, *lines: tuple[str, str]) -> "Plan":
        """The plan with the given plan lines added. A new line replaces an earlier one of the same name."""
        return replace(self, later_lines=(*self.later_lines, *lines))

    def with_torch_adam(self, why: str) -> "Plan":
        """The plan with torch's fused AdamW instead of DeepSpeed's FusedAdam, and a note with the reason `why`."""
        optimizer = self.deepspeed_config["optimizer"]
        changed = self.deepspeed_config | {"optimizer": optimizer | {"params": optimizer["params"] | TORCH_ADAM}}
        note = f"rewritten: torch's fused AdamW takes the place of DeepSpeed's FusedAdam, with the same numbers. {why}"
        return replace(self, deepspeed_config=changed, notes=(*self.notes, note))

    def model_lines(
        self,
        model: DescribedModel,
        stages: Sequence[StageLayers | None],
        *,
        capability: Arch | None = None,
        flash_3: str | None = None,
    ) -> list[tuple[str, str]]:
        """Plan lines about kernels, head, MLPs and pipeline stages of the model.

        `capability` is the GPU's compute capability, and `flash_3` says why FlashAttention 3 is not used (empty where
        it is); both are None without a GPU.
        """
        device, precision, has_fused, family = self.device, self.precision, self.kernels.has_others, model.family
        if capability is not None and not has_fused:
            flash_3 = TORCH_ONLY
        has_chunks = device != "cpu" and self.loss_kernel == "chunked" and self.objective.row.is_cross_entropy
        vocabulary = int(model["vocab_size"]) // self.mesh.tp
        return [
            *attention_lines(self.model.attention, model, device=device, precision=precision, flash_3=flash_3),
            *experts_lines(family, device=device, precision=precision, capability=capability, has_triton=has_fused),
            *self.kernels.lines(family),
            *([head_line(vocabulary, precision=precision, device=device)] if has_chunks else []),
            *([("MLPs", f"tokens in {mlp_tiles(model)} tiles")] if self.train.tiled_mlp else []),
            *self.stage_lines(stages),
        ]

    def stage_lines(self, stages: Sequence[StageLayers | None]) -> list[tuple[str, str]]:
        """Plan lines: layers of each pipeline rank, and its idle share of a step if all chunks take equal time."""
        stages_held = [part for part in stages if part is not None]
        if not stages_held:
            return []
        pp, vpp, accumulation = len(stages_held), len(stages_held[0].chunks), self.accumulation
        layers = ", ".join(str(part).replace(" to ", "-") for part in stages_held)
        forwards = f"{vpp} x {accumulation}" if vpp > 1 else f"{accumulation}"
        idle = f"{idle_fraction(pp=pp, vpp=vpp, micro_batches=accumulation):.0%} of a step"
        return [("stages", f"layers {layers}; each waits {idle} = ({pp} - 1) / ({forwards} + {pp} - 1)")]


def loss_kernel(name: str, *, device: str, tp: int = 1, is_cross_entropy: bool = True) -> str:
    """Loss kernel of a run: `chunked` or `liger`. `liger` computes only the cross entropy of tokens.

    ConfigError if `liger` is requested and cannot run, or if liger-kernel would run in another version than `LIGER`.
    """
    version = installed_version("liger-kernel")
    if tp > 1 and name == "liger":
        raise ConfigError(
            f"model.loss liger with parallel.tp {tp}: the kernel needs the full vocabulary on each rank",
            hint="set model.loss: auto",
        )
    if name == "liger" and not (device == "cuda" and version):
        given = f"device {device}, liger-kernel {version or 'not installed'}"
        raise ConfigError(
            f"model.loss liger needs a GPU and liger-kernel: {given}",
            hint="install the extra `gpu`, or set model.loss: auto",
        )
    if tp > 1 or not version or device != "cuda" or name == "chunked" or not is_cross_entropy:
        return "chunked"
    no_triton, install = triton_problem()
    if no_triton and name == "liger":
        raise ConfigError(f"model.loss liger needs Triton: {no_triton}", hint=install)
    if no_triton:
        return "chunked"
    if version != LIGER:
        raise ConfigError(
            f"liger-kernel {version} is installed, but the loss calls a private function of version {LIGER}",
            hint=f"pip install liger-kernel=={LIGER}, or set model.loss: chunked",
        )
    return "liger"


_DEFAULT_BUFFER = 100_000_000
"""DeepSpeed's default of `buffer_size` in elements (DeepSpeed 0.19.8, zero/offload_config.py)."""


def check_largest_slice(plan: Plan, tensors: Iterable[tuple[int, str]]) -> None:
    """ConfigError if a rank's shard of the largest tensor exceeds the buffer of `offload_param` to NVMe. `tensors` are
    pairs of number of elements and name.

    DeepSpeed 0.19.8 would fail an assertion while it builds the model (swap_tensor/partitioned_param_swapper.py:352).
    """
    if plan.offload_param != "nvme":
        return
    numel, name = max(tensors)
    section = plan.zero["offload_param"]
    needed, buffer_size = -(-numel // plan.zero_ranks), int(float(section.get("buffer_size", _DEFAULT_BUFFER)))
    if needed > buffer_size:
        raise ConfigError(
            f"offload_param.buffer_size {buffer_size:,} elements is smaller than a rank's shard of `{name}`, "
            f"{needed:,}",
            hint=f"set offload_param.buffer_size to {needed} or more, or train on more ranks than {plan.zero_ranks}",
        )


def is_teacher_partitioned(zero_stage: int, offload: str) -> bool:
    """Whether a teacher that runs beside the model is partitioned over all ranks; else each rank holds it in full."""
    return zero_stage == 3 or offload != "none"


def make_plan(given: RunSettings, *, world: World, device: str, accelerate: AccelerateChoices | None = None) -> Plan:
    """Plan a run on `world` with accelerator `device` (`cpu` or `cuda`); ConfigError where values contradict.
    Only the sections of the run file are read from `given`; its other fields are ignored.

    As long as `train.micro_batch_size: auto` is not resolved, it is planned as one row, and `train.precision: auto` is
    planned without information about a GPU.
    """
    run = _on_ranks(given, world, device, accelerate)
    check(run)
    finished, mesh, train, optim = run.deepspeed_config, run.mesh, run.train, run.optim
    # DeepSpeed's global batch is larger than the run's by the sequence parallel size, because DeepSpeed counts sequence
    # parallel ranks as data parallel (runtime/config.py, _batch_assertion).
    finished["train_batch_size"] = run.micro_batch_size * run.accumulation * mesh.dp * mesh.sp
    if run.zero_stage == 0 and train.precision == "fp32":
        # DeepSpeed's clipping is off and this program's engine clips, because DeepSpeed 0.19.8 counts tied weights
        # twice in the norm (runtime/utils.py:393) and takes the norm of each rank's experts separately.
        finished["gradient_clipping"] = 0.0
    notes = inexact_lines(run) + turn_off_wrong_options(run.zero, device=device)
    if optim.lr >= _HIGH_RATE and run.optimizer != "sgd" and optim.lr_scheduler != "exponential_rise":
        notes.append(f"optim.lr {optim.lr:g}: a step changes each weight by up to that; usual are 1e-6 to 1e-3")
    is_cross_entropy = run.objective.row.is_cross_entropy
    return Plan(
        **vars(run),
        world=world,
        loss_kernel=loss_kernel(run.model.loss, device=device, tp=mesh.tp, is_cross_entropy=is_cross_entropy),
        kernels=choose_kernels(run.model.kernels, device=device, stage=run.zero_stage),
        notes=tuple(notes),
    )


def _on_ranks(given: RunSettings, world: World, device: str, accelerate: AccelerateChoices | None) -> RunSettings:
    train = with_precision(given.train, device=device)[0]
    mesh = Mesh.of(given.parallel, world_size=world.world_size, rank=world.rank)
    accumulation = accumulation_steps(
        global_batch_size=train.global_batch_size, micro_batch_size=rows_of_forward(train), dp=mesh.dp
    )
    choices, source = read_choices(choose_deepspeed(given.deepspeed, accelerate))
    check_auto(train, choices, source, accelerate)
    stage_of(choices, source)
    choices = with_reduction_dtype(choices, train, source=source)
    tree = finish((choices, source), train, given.optim, accumulation=accumulation, on_cpu=device == "cpu")
    if accelerate:
        check_accelerate_agrees(accelerate, train, tree)
    sections = sections_of(given) | {"train": train}
    return RunSettings(**sections, mesh=mesh, device=device, deepspeed_config=tree, accumulation=accumulation)


def _decisions(plan: Plan) -> tuple[tuple[str, str], ...]:
    model, train = plan.model, plan.train
    offloads = {"optimizer": plan.offload_optimizer, "parameters": plan.offload_param}
    offloaded = "".join(f", {name} on {place}" for name, place in offloads.items() if place != "none")
    weights = "random weights" if model.weights == "random" else "its weights"
    rows = f"{train.global_batch_size} rows = "
    rows += (
        f"micro x accumulation x dp {plan.dp}, micro as large as fits (auto)"
        if train.micro_batch_size == AUTO
        else f"micro {plan.micro_batch_size} x accumulation {plan.accumulation} x dp {plan.dp}"
    )
    tokens = f"{train.max_seq_len} tokens a row at most{', packed' if plan.data.packing else ''}"
    tokens += ", for both sides of a pair together" if plan.objective.unit == "pairs" else ""
    return (
        ("model", f"{model.path} ({weights}, {plan.precision})"),
        ("ranks", f"{plan.world.world_size} on {plan.device}, started by {plan.world.launcher}"),
        ("layout", f"{plan.mesh}, ZeRO-{plan.zero_stage}{offloaded}"),
        ("batch", f"{rows}, {tokens}"),
        *_communication(plan, plan.train.reduction_dtype),
        *((("inexact", ", ".join(plan.inexact)),) if plan.inexact else ()),
        ("recomputation", plan.activation_checkpointing),
        *([("activations", "inputs of recomputed layers in host memory")] if plan.train.activation_offload else []),
        *_objective_lines(plan.objective),
        ("loss", _loss_text(plan.objective, kernel=plan.loss_kernel)),
        ("length", plan.train.duration),
        ("checkpoints", _checkpoints(plan.checkpoint, is_asynchronous=plan.saves_asynchronously)),
    )


def _communication(plan: Plan, reduction_dtype: str) -> tuple[tuple[str, str], ...]:
    if plan.world.world_size == 1:
        return ()
    each = plan.zero_stage >= 2 and not plan.reduces_once and plan.accumulation > 1
    dtype = plan.precision if reduction_dtype == "auto" else reduction_dtype
    given = plan.deepspeed_config.get("communication_data_type")
    text = f"gradients summed in {given or dtype} {'in each forward' if each else 'once a step'}"
    if plan.zero.get("overlap_comm", False):
        is_after = plan.reduces_once or plan.mesh.pp > 1
        text += ", after the backward pass in spite of overlap_comm" if is_after else ", beside the backward pass"
    return (("communication", text),)


def _checkpoints(checkpoint: CheckpointConfig, *, is_asynchronous: bool) -> str:
    if not checkpoint.saves:
        return "never"
    best = " and the best" if checkpoint.keep_best else ""
    how = "asynchronous" if is_asynchronous else "synchronous"
    return f"every {checkpoint.every}, the last {checkpoint.keep}{best} kept, {how}"


def _objective_lines(objective: ObjectiveConfig) -> list[tuple[str, str]]:
    if objective.name == "sft":
        return []
    keys = (name for name in type(objective).model_fields if name not in ("name", "reference"))
    values = ((name, getattr(objective, name)) for name in keys)
    numbers = ", ".join(f"{name} {value}" for name, value in values if value not in (None, (), 0.0, "none"))
    return [
        ("objective", f"{objective.name}{f' ({numbers})' if numbers else ''}"),
        *([] if objective.reference_source is None else [("reference", _REFERENCES[objective.reference_source])]),
    ]


_REFERENCES = {
    "cache": "the model before training; its log-probabilities are computed once and cached",
    "adapters_off": "the model without its adapters, in a further forward of each step",
}


def _loss_text(objective: ObjectiveConfig, *, kernel: str) -> str:
    text = f"mean over the {objective.unit} of the global batch"
    if objective.chosen_weight:
        text += f", plus {objective.chosen_weight:g} x the mean cross entropy of its chosen tokens"
    return text if objective.row.head == "scores" else f"{kernel} kernel, {text}"
