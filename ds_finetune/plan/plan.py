"""The plan of a run: what is decided by arithmetic before anything is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ds_finetune.config.schema import RunConfig
from ds_finetune.errors import ConfigError
from ds_finetune.plan.batch import accumulation_steps
from ds_finetune.plan.combinations import check_layout, check_lora
from ds_finetune.plan.deepspeed_choice import chosen, refuse_accelerate_contradictions
from ds_finetune.plan.deepspeed_config import HAS_TORCH_ADAM, MOMENTS, TORCH_ADAM, finish, read_choices, stage_of
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.options import Situation, apply_rules, offload_device
from ds_finetune.plan.timeouts import refuse_late_watchdog
from ds_finetune.world import AccelerateChoices, World

LIGER = "0.8.5"
"""Version of liger-kernel whose fused loss is called as model/cross_entropy.py does; a private function that may
change.
"""


@dataclass(frozen=True)
class Plan:
    """Everything the engine needs to know, as plain numbers: batch triple, ZeRO stage, offload, the DeepSpeed dict and
    visible notes.
    """

    config: RunConfig
    world: World
    mesh: Mesh
    device: str
    zero_stage: int
    offload_optimizer: str
    offload_param: str
    gradient_accumulation_steps: int
    loss_kernel: str
    deepspeed: dict[str, Any] = field(repr=False)
    notes: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    """Parameters that are not trained, because no loss reaches them; checkpoints and exports keep them."""

    @property
    def dp(self) -> int:
        """Parts the global batch is shared out in."""
        return self.mesh.dp

    @property
    def zero_ranks(self) -> int:
        """Ranks that DeepSpeed averages gradients over and shards among: all that hold the same part of the model."""
        return self.mesh.dp * self.mesh.sp

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of a checkpoint for each trained parameter: fp32 weight and moments."""
        return 4 * (1 + MOMENTS[self.config.optim.name.lower()])

    @property
    def saves_aside(self) -> bool:
        """Whether checkpoints are copied to host memory and written from there; a state on NVMe is not, it may
        not fit.
        """
        return self.config.checkpoint.asynchronous and self.offload_optimizer != "nvme"

    @property
    def needs_fused_adam(self) -> bool:
        """Whether DeepSpeed's FusedAdam is the optimizer's kernel, which has to be compiled by nvcc."""
        if self.device == "cpu" or self.offload_optimizer != "none":
            return False
        optimizer = self.deepspeed["optimizer"]
        return optimizer["type"].lower() in HAS_TORCH_ADAM and not optimizer["params"].get("torch_adam")

    @property
    def may_take_torch_adam(self) -> bool:
        """Whether torch's fused AdamW may take the place of FusedAdam; a user who sets `torch_adam` to false does not
        want it.
        """
        return self.needs_fused_adam and "torch_adam" not in self.deepspeed["optimizer"]["params"]

    def with_torch_adam(self, why: str) -> "Plan":
        """The same with torch's fused AdamW instead of DeepSpeed's FusedAdam, and a note that says why."""
        optimizer = self.deepspeed["optimizer"]
        deepspeed = self.deepspeed | {"optimizer": optimizer | {"params": optimizer["params"] | TORCH_ADAM}}
        note = f"rewritten: torch's fused AdamW takes the place of DeepSpeed's FusedAdam, with the same numbers. {why}"
        return replace(self, deepspeed=deepspeed, notes=(*self.notes, note))

    def lines(self) -> list[tuple[str, str]]:
        """Name and text of each decision, as announced before anything is loaded."""
        train = self.config.train
        return [
            ("model", f"{self.config.model.path} ({self.config.model.weights} weights, {train.precision})"),
            ("ranks", f"{self.world.world_size} on {self.device}, started by {self.world.launcher}"),
            (
                "layout",
                f"{self.mesh}, ZeRO-{self.zero_stage}, offload optimizer {self.offload_optimizer}, param "
                f"{self.offload_param}",
            ),
            (
                "batch",
                f"{train.global_batch_size} rows = micro {train.micro_batch_size} x accumulation "
                f"{self.gradient_accumulation_steps}"
                f" x dp {self.dp}, {train.max_seq_len} tokens a row at "
                f"most{', packed' if self.config.data.packing else ''}",
            ),
            ("loss", f"{self.loss_kernel} kernel, mean over the supervised tokens of the global batch"),
            ("length", train.duration),
            ("checkpoints", self._checkpoints()),
        ]

    def stage_lines(self, stages: Sequence[range | None]) -> list[tuple[str, str]]:
        """Which layers each pipeline stage has, and how long it waits for others in a step whose turns all take as
        long.
        """
        layers = [f"{part[0]}-{part[-1]}" for part in stages if part is not None]
        idle = (self.mesh.pp - 1) / (self.gradient_accumulation_steps + self.mesh.pp - 1)
        return [("stages", f"layers {', '.join(layers)}; each waits {idle:.0%} of a step")] if layers else []

    def _checkpoints(self) -> str:
        wanted = self.config.checkpoint
        if not wanted.every_steps:
            return "never"
        how = "written aside" if self.saves_aside else "written at once"
        return f"every {wanted.every}, the last {wanted.keep}{' and the best' if wanted.keep_best else ''} kept, {how}"


def loss_kernel(asked: str, *, device: str, tp: int = 1) -> str:
    """`chunked` or `liger`; ConfigError where Liger's is asked for and cannot run, or has another version than
    `LIGER`.
    """
    found = _liger_version()
    if tp > 1:
        if asked == "liger":
            raise ConfigError(
                f"model.loss liger with parallel.tp {tp}: its kernel needs the whole vocabulary",
                hint="set model.loss to auto",
            )
        return "chunked"
    if asked == "liger" and not (device == "cuda" and found):
        given = f"device {device}, liger-kernel {found or 'not installed'}"
        raise ConfigError(
            f"model.loss liger needs a GPU and liger-kernel: {given}",
            hint="install the extra `gpu`, or set model.loss to auto",
        )
    if not found or device != "cuda" or asked == "chunked":
        return "chunked"
    if found != LIGER:
        raise ConfigError(
            f"liger-kernel {found} is installed, and the loss calls a function of {LIGER} that is private there",
            hint=f"pip install liger-kernel=={LIGER}, or set model.loss to chunked",
        )
    return "liger"


def _liger_version() -> str:
    """The installed version, empty where there is none."""
    try:
        return version("liger-kernel")
    except PackageNotFoundError:
        return ""


def _refuse_other_wrapper(tree: dict[str, Any], stage: int, precision: str) -> None:
    """DeepSpeed 0.19.8 then takes its BF16_Optimizer (runtime/engine.py:2305), whose state nothing here knows or has
    compared.
    """
    given = (tree.get("data_types") or {}).get("grad_accum_dtype")
    if given not in (None, "auto") and stage < 2 and precision == "bf16":
        raise ConfigError(
            f"data_types.grad_accum_dtype {given!r} with zero stage {stage} in bf16 is not proven",
            hint="use stage 2 or 3, or leave it out",
        )


def make_plan(config: RunConfig, *, world: World, device: str, accelerate: AccelerateChoices | None = None) -> Plan:
    """Decide the layout of `config` on `world` with accelerator `device` (`cpu` or `cuda`); ConfigError where values
    contradict.
    """
    refuse_late_watchdog(config.watchdog)
    mesh = Mesh.of(config.parallel, world_size=world.world_size, rank=world.rank)
    accumulation = accumulation_steps(
        global_batch_size=config.train.global_batch_size, micro_batch_size=config.train.micro_batch_size, dp=mesh.dp
    )
    tree, source = read_choices(chosen(config, accelerate))
    stage = stage_of(tree, source)
    _refuse_other_wrapper(tree, stage, config.train.precision)
    finished = finish(tree, config, accumulation=accumulation, source=source, on_cpu=device == "cpu")
    if accelerate:
        refuse_accelerate_contradictions(accelerate, config, finished)
    # Ranks that share rows are data parallel ranks to DeepSpeed (runtime/config.py, _batch_assertion), and the global
    # batch so much larger.
    finished["train_batch_size"] = config.train.micro_batch_size * accumulation * mesh.dp * mesh.sp
    if stage == 0 and config.train.precision == "fp32":
        # The engine clips itself: DeepSpeed 0.19.8 counts copies of tied weights twice there (runtime/utils.py:393) and
        # parts of experts apart.
        finished["gradient_clipping"] = 0.0
    zero = finished["zero_optimization"]
    offloads = offload_device(zero, "offload_optimizer"), offload_device(zero, "offload_param")
    check_layout(mesh, config, stage=stage, offloads=offloads, tree=finished)
    check_lora(mesh, config, stage=stage, offloads=offloads, tree=finished)
    notes = apply_rules(
        zero, Situation(device, stage, config.train.precision, config.optim.name, config.train.max_grad_norm)
    )
    return Plan(
        config=config,
        world=world,
        mesh=mesh,
        device=device,
        zero_stage=stage,
        offload_optimizer=offloads[0],
        offload_param=offloads[1],
        gradient_accumulation_steps=accumulation,
        loss_kernel=loss_kernel(config.model.loss, device=device, tp=mesh.tp),
        deepspeed=finished,
        notes=tuple(notes),
    )
