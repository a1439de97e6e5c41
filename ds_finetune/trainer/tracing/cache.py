"""Cache of traces: a model in a layout is traced once. Reading a trace needs neither torch nor the model."""

import json
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ds_finetune.config.objectives import is_distillation
from ds_finetune.console.phase_line import Say, say_nothing
from ds_finetune.errors import FinetuneError, ModelError
from ds_finetune.plan.config_json import read_config_json
from ds_finetune.plan.estimate.traced import TracedLayer, TracedModel
from ds_finetune.plan.kernels import version_of
from ds_finetune.plan.plan import Plan
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.info import source_version
from ds_finetune.system.whole_file import replace_file

if TYPE_CHECKING:
    from ds_finetune.model.build.model_plan import ModelPlan


class Traces:
    """Activations of a run's model by layout, cached in memory and below `data.cache_dir`. If a trace is missing,
    `build` plans the model, and `say` announces the tracing, which takes seconds.
    """

    def __init__(self, run: RunSettings, build: Callable[[], "ModelPlan"], say: Say = say_nothing) -> None:
        self._run, self._build, self._say = run, build, say
        self._folder = Path(run.data.cache_dir, "traces")
        self._traced: dict[str, TracedModel] = {}

    def __call__(self, plan: Plan) -> TracedModel:
        """Traced activations of a rank of `plan`. ConfigError or ModelError if the model cannot be built."""
        key = xxhash.xxh3_128_hexdigest(f"{self._of_model} {traced_layout(plan)}".encode())
        if key not in self._traced:
            self._traced[key] = self._read(key) or self._trace(plan, key)
        return self._traced[key]

    @cached_property
    def _of_model(self) -> str:
        objective = self._run.objective
        teacher = objective.teacher if is_distillation(objective) else None
        trees = [read_config_json(path) for path in (self._run.model.path, teacher) if path is not None]
        packages = {name: version_of(name) for name in ("torch", "transformers", "deepspeed", "liger-kernel")}
        key = [source_version(), packages, trees, self._run.model.context, self._run.model.resize_vocabulary]
        return json.dumps([*key, self._run.features], sort_keys=True, default=repr)

    def _read(self, key: str) -> TracedModel | None:
        with suppress(OSError, ValueError, TypeError, LookupError):
            tree = json.loads((self._folder / f"{key}.json").read_text(encoding="utf-8"))
            layers = [TracedLayer(**layer) for layer in tree["layers"]]
            return TracedModel(**tree | {"layers": tuple(layers[number] for number in tree.pop("stands"))})
        return None

    def _trace(self, plan: Plan, key: str) -> TracedModel:
        from ds_finetune.trainer.tracing.activations import trace

        self._say("computing a forward and backward on tensors without memory, for the estimate of activations")
        try:
            traced = trace(plan, self._build())
        except FinetuneError:
            raise
        except Exception as error:
            # Tracing fails if a model or another package's feature needs the values of tensors, because fake tensors
            # have none.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
            reason = ": ".join((reason, *str(error).splitlines()[:1]))
            raise ModelError(
                f"the activations of {self._run.model.path} cannot be traced: {reason}",
                hint="the run may still train: start a short run to learn its memory",
            ) from error
        layers = list(dict.fromkeys(traced.layers))
        tree = asdict(traced) | {"layers": list(map(asdict, layers)), "stands": list(map(layers.index, traced.layers))}
        # Without a writable cache folder, the next start traces the activations again.
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / f"{key}.json", json.dumps(tree) + "\n")
        return traced


def traced_layout(plan: Plan) -> tuple[object, ...]:
    """All values of a plan that activations depend on; they are the key of a cached trace."""
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
