"""Cache of traces: a model in a layout is traced once. Reading a cached trace needs neither torch nor the model."""

import json
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from ds_finetune.config.objectives import is_distillation
from ds_finetune.console.phase_line import Say, say_nothing
from ds_finetune.errors import FinetuneError, ModelError
from ds_finetune.plan.config_json import read_config_json
from ds_finetune.plan.estimate.traced import TracedLayer, TracedModel
from ds_finetune.plan.mesh import Mesh
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.info import source_version
from ds_finetune.system.versions import installed_version
from ds_finetune.system.whole_file import replace_file

if TYPE_CHECKING:
    from ds_finetune.model.build.model_plan import ModelPlan


T = TypeVar("T")
Tree = dict[str, Any]


class Traces:
    """Activations and FLOPs of a run's model by layout, cached in memory and below `data.cache_dir`. If a trace is
    missing, `build` plans the model, and `say` announces the tracing, which takes seconds.
    """

    def __init__(self, run: RunSettings, build: Callable[[], "ModelPlan"], say: Say = say_nothing) -> None:
        self._run, self._build, self._say = run, build, say
        self._folder = Path(run.data.cache_dir, "traces")
        self._results: dict[str, Any] = {}

    def __call__(self, plan: Plan) -> TracedModel:
        """Traced activations of a rank of `plan`. ConfigError or ModelError if the model cannot be built."""

        def compute(model: "ModelPlan") -> Tree:
            from ds_finetune.trainer.tracing.activations import trace

            traced = trace(plan, model)
            layers = list(dict.fromkeys(traced.layers))
            stands = list(map(layers.index, traced.layers))
            return asdict(traced) | {"layers": list(map(asdict, layers)), "stands": stands}

        def parse(tree: Tree) -> TracedModel:
            layers = [TracedLayer(**layer) for layer in tree["layers"]]
            return TracedModel(**tree | {"layers": tuple(layers[number] for number in tree.pop("stands"))})

        return self._result("activations", plan, compute, parse)

    def flops_per_token(self, plan: Plan, tokens: int) -> float:
        """Model FLOPs per token in forward and backward, for rows of `tokens` tokens, without recomputation. They are
        those of the full model, however many ranks share it. Raises the errors of `__call__`.
        """
        plain = {"activation_checkpointing": "none", "activation_offload": False, "tiled_mlp": False}
        train = plan.train.model_copy(update={**plain, "micro_batch_size": 1, "max_seq_len": tokens})
        one_row = replace(plan, mesh=Mesh(0, 1), train=train)

        def compute(model: "ModelPlan") -> Tree:
            from ds_finetune.trainer.tracing.activations import count_flops

            return {"flops": count_flops(one_row, model)}

        return self._result("FLOPs", one_row, compute, lambda tree: float(tree["flops"])) / tokens

    @cached_property
    def _of_model(self) -> str:
        objective = self._run.objective
        teacher = objective.teacher if is_distillation(objective) else None
        trees = [read_config_json(path) for path in (self._run.model.path, teacher) if path is not None]
        packages = {name: installed_version(name) for name in ("torch", "transformers", "deepspeed", "liger-kernel")}
        key = [source_version(), packages, trees, self._run.model.context, self._run.model.resize_vocabulary]
        return json.dumps([*key, self._run.features], sort_keys=True, default=repr)

    def _result(self, kind: str, plan: Plan, compute: Callable[["ModelPlan"], Tree], parse: Callable[[Tree], T]) -> T:
        text = f"{kind} {self._of_model} {traced_layout(plan)}"
        file = self._folder / f"{xxhash.xxh3_128_hexdigest(text.encode())}.json"
        if file.stem not in self._results:
            with suppress(OSError, ValueError, TypeError, LookupError):
                self._results[file.stem] = parse(json.loads(file.read_text(encoding="utf-8")))
        if file.stem not in self._results:
            self._say(f"computing a forward and backward on tensors without memory, to trace the model's {kind}")
            try:
                tree = compute(self._build())
            except FinetuneError:
                raise
            except Exception as error:
                # Tracing fails if a model or another package's feature needs the values of tensors, because fake
                # tensors have none.
                frame = traceback.extract_tb(error.__traceback__)[-1]
                reason = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
                reason = ": ".join((reason, *str(error).splitlines()[:1]))
                raise ModelError(
                    f"the {kind} of {self._run.model.path} cannot be traced: {reason}",
                    hint="the run may still train: start a short run to learn its memory",
                ) from error
            # Without a writable cache folder, the next start traces again.
            with suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
                replace_file(file, json.dumps(tree) + "\n")
            self._results[file.stem] = parse(tree)
        result: T = self._results[file.stem]
        return result


def traced_layout(plan: Plan) -> tuple[object, ...]:
    """All values of a plan that its activations and FLOPs depend on; they are the key of a cached trace."""
    mesh = plan.mesh
    # On a CPU, the number of threads determines the size of the blocks in which logits are computed.
    threads = (os.environ.get("OMP_NUM_THREADS"), os.cpu_count()) if plan.device == "cpu" else ()
    sizes = mesh.tp, mesh.sp, mesh.ep, mesh.pp > 1, plan.micro_batch_size, plan.train.max_seq_len
    train = (plan.precision, plan.activation_checkpointing, plan.train.activation_offload, plan.train.tiled_mlp)
    kernels = (plan.device, plan.model.attention, plan.loss_kernel, plan.kernels)
    sections = (
        plan.frozen,
        plan.train.only,
        plan.train.freeze,
        plan.lora,
        plan.mtp,
        plan.router,
        plan.indexer,
        plan.objective,
    )
    return sizes, threads, list(map(repr, (*train, *kernels, *sections)))
