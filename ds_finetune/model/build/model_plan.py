"""The plan of a run's model, computed once from its config.json and the run file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PretrainedConfig

from ds_finetune.config.objectives import ObjectiveConfig
from ds_finetune.config.sections import MtpConfig
from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.lora_plan import LoraPlan
from ds_finetune.model.build.meta_model import described
from ds_finetune.model.build.skeleton import Task
from ds_finetune.model.loss.teacher import TeacherPlan
from ds_finetune.objectives.objective import Objective
from ds_finetune.plan.context import ContextPlan
from ds_finetune.plan.freezing import FreezePlan
from ds_finetune.plan.indexer import IndexerPlan
from ds_finetune.plan.layer_stages import StageLayers
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.routers import RouterPlan


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The model that the engine builds: configuration, weights, and which parts are split, adapted and quantised."""

    path: str
    """Folder or hub id of the model."""
    hf_config: PretrainedConfig = field(repr=False)
    """Configuration of the model as trained, with the size of the trained vocabulary."""
    attention: str
    has_random_weights: bool
    resizes_vocabulary: bool
    published_vocab_size: int
    """Vocabulary size in the published config.json; less than the trained size if rows are added."""
    stages: tuple[StageLayers | None, ...]
    """Layers of each pipeline stage; (None,) where a rank holds all layers."""
    objective: Objective
    features: Mapping[str, Any] = field(default_factory=dict)
    """Plan of each enabled feature by the feature's name. A feature of another package has its settings here."""
    mlp_tiles: int = 1
    """Number of tiles of tokens that MLPs compute in turn; 1 for all tokens at once."""
    context: ContextPlan | None = None
    """Context length that the run file sets; None where it sets none."""
    padding: str = ""
    """Message to the user about a classifier's padding token."""
    without_noise: tuple[str, ...] = ()
    """Dropouts of config.json that training turns off, because the objective compares the model with a reference."""

    @property
    def lora(self) -> LoraPlan | None:
        """The LoRA plan; None where every weight is trained."""
        return self.features.get("adapters")

    @property
    def freezing(self) -> FreezePlan | None:
        """The parameters that `train.only` and `train.freeze` freeze; None without these keys."""
        return self.features.get("freezing")

    @property
    def mtp(self) -> MtpConfig | None:
        """How the multi-token prediction layer is trained; None where it is not trained."""
        return self.features.get("mtp")

    @property
    def router(self) -> RouterPlan | None:
        """The plan of expert routers; None for a model without routers."""
        return self.features.get("routers")

    @property
    def indexer(self) -> IndexerPlan | None:
        """The plan of trained indexers; None where none is trained."""
        return self.features.get("indexer")

    @property
    def teacher(self) -> TeacherPlan | None:
        """The plan of the live teacher; None without one."""
        return self.features.get("teacher")

    @property
    def task(self) -> Task:
        """The model's task: causal LM or sequence classification."""
        return task_of(self.objective)

    @cached_property
    def described(self) -> DescribedModel:
        """Names and shapes of the tensors of the model, and of its live teacher if there is one."""
        return described(self.hf_config, self.task, teacher=None if self.teacher is None else self.teacher.hf_config)

    def is_untrained(self, name: str) -> bool:
        """Whether no loss of the run trains the parameter `name`: an indexer's parameter if indexers are not trained,
        and any other parameter if only indexers are trained.
        """
        is_of_indexer = family_of(self.hf_config.model_type).is_of_indexer(name)
        if self.indexer is None:
            return is_of_indexer
        return self.indexer.trains_only_indexers and not is_of_indexer

    @property
    def head_outputs(self) -> int:
        """Number of outputs of the head: scores of a document, or the size of the vocabulary."""
        return self.objective.num_outputs or int(self.hf_config.vocab_size)

    @property
    def quantised(self) -> tuple[str, ...]:
        """Full names of the modules with weights in four bits."""
        return tuple(target.name for target in self.lora.quantised) if self.lora is not None else ()


def task_of(objective: Objective | ObjectiveConfig) -> Task:
    """The task of a model trained for the objective: causal LM or sequence classification."""
    return "sequence_classification" if objective.num_outputs else "causal_lm"
