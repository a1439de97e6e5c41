"""Keeps what was traced: the same model in the same layout is traced once."""

import json
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
import xxhash

import ds_finetune
from ds_finetune.checkpoint.run_state import versions
from ds_finetune.console.phase_line import Say, say_nothing
from ds_finetune.model.build.model_plan import ModelPlan
from ds_finetune.plan.estimate.traced import TracedLayer, TracedModel
from ds_finetune.plan.plan import Plan
from ds_finetune.system.whole_file import replace_file
from ds_finetune.trainer.tracing.activations import trace


class Traces:
    """The activations of `model` by layout, which are kept in memory and below `cache_dir`; `say` tells that one is
    traced, which takes seconds.
    """

    def __init__(self, model: ModelPlan, cache_dir: Path | str, say: Say = say_nothing) -> None:
        self._model, self._folder, self._say = model, Path(cache_dir, "traces"), say
        self._known: dict[str, TracedModel] = {}

    def __call__(self, plan: Plan) -> TracedModel:
        """The activations of a rank of `plan`; ConfigError or ModelError where its model cannot be built so."""
        key = _digest(plan, self._model)
        if key not in self._known:
            self._known[key] = self._read(key) or self._trace(plan, key)
        return self._known[key]

    def _read(self, key: str) -> TracedModel | None:
        with suppress(OSError, ValueError, TypeError, KeyError):
            tree = json.loads((self._folder / f"{key}.json").read_text(encoding="utf-8"))
            layers = [TracedLayer(**layer) for layer in tree["layers"]]
            return TracedModel(**tree | {"layers": tuple(layers[number] for number in tree.pop("stands"))})
        return None

    def _trace(self, plan: Plan, key: str) -> TracedModel:
        self._say("computing a forward and backward on tensors without memory, for the estimate of activations")
        found = trace(plan, self._model)
        layers = list(dict.fromkeys(found.layers))
        tree = asdict(found) | {"layers": list(map(asdict, layers)), "stands": list(map(layers.index, found.layers))}
        # A folder that cannot be written means another trace at the next start.
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_file(self._folder / f"{key}.json", json.dumps(tree) + "\n")
        return found


def _digest(plan: Plan, model: ModelPlan) -> str:
    mesh, batch = plan.mesh, plan.batch
    teacher = None if model.teacher is None else model.teacher.hf_config.to_dict()
    key = [
        _of_program(),
        versions(),
        torch.get_num_threads() if plan.device == "cpu" else 0,
        model.hf_config.to_dict(),
        teacher,
        sorted(map(repr, model.features.items())),
        list(map(repr, _of_layout(plan))),
        (mesh.tp, mesh.sp, mesh.ep, mesh.pp > 1, batch.micro_batch_size, batch.max_seq_len),
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True, default=str).encode())


def _of_layout(plan: Plan) -> tuple[object, ...]:
    """What activations depend on, besides mesh and batch."""
    train = (plan.precision, plan.activation_checkpointing, plan.train.activation_offload, plan.train.tiled_mlp)
    kernels = (plan.device, plan.model.attention, plan.loss_kernel, plan.kernels)
    return (*train, *kernels, plan.frozen, plan.lora, plan.mtp, plan.router, plan.indexer, plan.objective)


@cache
def _of_program() -> str:
    """A digest of the source of this program that models are built and traced by."""
    folder, found = Path(ds_finetune.__file__).parent, xxhash.xxh3_128()
    for part in ("model", "features", "foreign", "engine", "objectives", "trainer/tracing"):
        for file in sorted((folder / part).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()
