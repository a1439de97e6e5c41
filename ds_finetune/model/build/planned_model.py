"""Reads config.json and tensor shapes of a run's model for `ds-finetune plan`. An earlier plan's cache file spares the
import of torch and transformers, which takes seconds.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ds_finetune.config.objectives import is_distillation
from ds_finetune.plan.config_json import read_config_json
from ds_finetune.plan.model_tensors import DescribedModel, FullTensor, ModelTensors
from ds_finetune.plan.settings import RunSettings
from ds_finetune.system.info import source_version
from ds_finetune.system.whole_file import replace_file


def model_of_run(run: RunSettings) -> DescribedModel:
    """Describe a run's model and its teacher. ModelError if a config.json does not describe a model."""
    objective, folder = run.objective, Path(run.data.cache_dir, "tensors")
    teacher = objective.teacher if is_distillation(objective) else None
    return DescribedModel(
        *_read(run.model.path, folder, mtp_layers=int(run.mtp.train), scores=objective.num_outputs),
        teacher=None if teacher is None else DescribedModel(*_read(teacher, folder)),
    )


def _read(
    path: str, folder: Path, *, mtp_layers: int = 0, scores: int = 0
) -> tuple[dict[str, Any], Callable[[], ModelTensors]]:
    """Return a model's configuration with transformers' defaults, and a function that lists its tensors."""
    packages = [source_version(), version("torch"), version("transformers")]
    text = json.dumps([read_config_json(path), mtp_layers, scores, packages], sort_keys=True)
    file = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        config, tensors, *rest = json.loads(file.read_text(encoding="utf-8"))
        by_name = {name: FullTensor(tuple(shape), *cut) for name, (shape, *cut) in tensors.items()}
        return config, partial(ModelTensors, by_name, *rest)
    from ds_finetune.model.build.meta_model import read_tensors
    from ds_finetune.model.build.skeleton import read_hf_config
    from ds_finetune.model.mtp import set_mtp_layers

    hf_config = read_hf_config(path, files=("config.json",), task="sequence_classification" if scores else "causal_lm")
    config = hf_config.to_dict()

    def build() -> ModelTensors:
        set_mtp_layers(hf_config, mtp_layers)
        hf_config.num_labels = scores or hf_config.num_labels
        built = read_tensors(hf_config, "sequence_classification" if scores else "causal_lm")
        # A cache file that cannot be written is no error: later plans are only slower.
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(file, json.dumps([config, built.by_name, built.is_tied, built.num_predictions, built.linears]))
        return built

    return config, build
