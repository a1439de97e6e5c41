"""The model that a run builds, worked out once from its config.json and the run file."""

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
    """What the engine builds: where the weights are, and which parts of the model are split, adapted and quantised."""

    path: str
    """Folder or hub id of the model."""
    hf_config: PretrainedConfig = field(repr=False)
    """The configuration of the model as it is trained, with the vocabulary it has then."""
    attention: str
    has_random_weights: bool
    resizes_vocabulary: bool
    published_vocab_size: int
    """Tokens of the vocabulary in the published config.json; fewer than are trained where rows are added."""
    stages: tuple[StageLayers | None, ...]
    """Layers of each pipeline rank; one None where a rank holds all."""
    objective: Objective
    features: Mapping[str, Any] = field(default_factory=dict)
    """What each feature that is on has planned, by its name; of other packages' features, their settings."""
    mlp_tiles: int = 1
    """Parts of the tokens of a forward that MLPs compute by turns; 1 where they compute all at once."""
    context: ContextPlan | None = None
    """How many tokens the run file wants positions for; None where it does not say."""
    padding: str = ""
    """A text on the padding token of a classifier, for people."""
    without_noise: tuple[str, ...] = ()
    """Dropouts of config.json that are off in training, because the objective compares the model with a reference."""

    @property
    def lora(self) -> LoraPlan | None:
        """The adapters; None where every weight is trained."""
        return self.features.get("adapters")

    @property
    def freezing(self) -> FreezePlan | None:
        """What `train.only` and `train.freeze` leave as it is; None without them."""
        return self.features.get("freezing")

    @property
    def mtp(self) -> MtpConfig | None:
        """How the multi-token prediction layer is trained; None where it is not."""
        return self.features.get("mtp")

    @property
    def router(self) -> RouterPlan | None:
        """The routers of experts; None where there are none."""
        return self.features.get("routers")

    @property
    def indexer(self) -> IndexerPlan | None:
        """The indexers that are trained; None where none is."""
        return self.features.get("indexer")

    @property
    def teacher(self) -> TeacherPlan | None:
        """The live teacher; None where there is none."""
        return self.features.get("teacher")

    @property
    def task(self) -> Task:
        """What the model computes."""
        return task_of(self.objective)

    @cached_property
    def described(self) -> DescribedModel:
        """The model with the names and shapes of its tensors, and its live teacher."""
        return described(self.hf_config, self.task, teacher=None if self.teacher is None else self.teacher.hf_config)

    def is_untrained(self, name: str) -> bool:
        """Whether no loss of the run reaches the parameter `name`: it is an indexer's, or none where they are trained
        alone.
        """
        is_of_indexer = family_of(self.hf_config.model_type).is_of_indexer(name)
        if self.indexer is None:
            return is_of_indexer
        return self.indexer.is_alone and not is_of_indexer

    @property
    def head_outputs(self) -> int:
        """Outputs of the head: scores of a document, or the tokens of the vocabulary."""
        return self.objective.num_outputs or int(self.hf_config.vocab_size)

    @property
    def quantised(self) -> tuple[str, ...]:
        """Full names of the modules whose weights are held in four bits."""
        return tuple(target.name for target in self.lora.quantised) if self.lora is not None else ()


def task_of(objective: Objective | ObjectiveConfig) -> Task:
    """What a model that is trained for the objective computes."""
    return "sequence_classification" if objective.num_outputs else "causal_lm"
