"""The plan of a run's model, made once from its config.json and the run file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PretrainedConfig

from ds_finetune.config.objectives import ObjectiveConfig
from ds_finetune.config.sections import MtpConfig
from ds_finetune.families.family import Family
from ds_finetune.families.table import family_of
from ds_finetune.model.adapters.lora_plan import LoraPlan
from ds_finetune.model.build.meta_model import described
from ds_finetune.model.build.skeleton import Task
from ds_finetune.model.loss.teacher import TeacherPlan
from ds_finetune.objectives.objective import Objective
from ds_finetune.plan.context import ContextPlan
from ds_finetune.plan.layer_stages import StageLayers
from ds_finetune.plan.model_tensors import DescribedModel
from ds_finetune.plan.trained_parts import FreezePlan, IndexerPlan, RouterPlan, is_reached


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """How the engine builds the run's model: configuration, weights, and what is sharded, adapted or quantised."""

    path: str
    """Folder or hub id of the model."""
    hf_config: PretrainedConfig = field(repr=False)
    """Configuration of the model in training. Its vocabulary includes added tokens."""
    attention: str
    has_random_weights: bool
    resizes_vocabulary: bool
    published_vocab_size: int
    """Vocabulary size in the published config.json; training uses more if token embeddings are added."""
    stages: tuple[StageLayers | None, ...]
    """Layers of each pipeline stage; (None,) without pipeline parallelism."""
    objective: Objective
    features: Mapping[str, Any] = field(default_factory=dict)
    """Plans of the enabled features, by name. A feature of another package has settings instead of a plan."""
    mlp_tiles: int = 1
    """Number of tiles in which MLPs compute their tokens; 1 means all tokens at once."""
    context: ContextPlan | None = None
    """How the run file's `model.context` changes the context length; None if it is not set."""
    padding: str = ""
    """Message for the user about a classifier's padding token; empty if there is nothing to say."""
    without_noise: tuple[str, ...] = ()
    """Dropouts and router noise that are set to 0, because the objective compares with a reference model."""

    @property
    def family(self) -> Family:
        """The model's row in the table of families."""
        return family_of(self.hf_config.model_type)

    @property
    def lora(self) -> LoraPlan | None:
        """The plan of adapters; None without LoRA."""
        return self.features.get("adapters")

    @property
    def freezing(self) -> FreezePlan | None:
        """Which parameters `train.only` or `train.freeze` freezes; None if neither is set."""
        return self.features.get("freezing")

    @property
    def mtp(self) -> MtpConfig | None:
        """Settings of the multi-token prediction layer's training; None if it is not trained."""
        return self.features.get("mtp")

    @property
    def router(self) -> RouterPlan | None:
        """The plan for routers of experts; None for a model without routers."""
        return self.features.get("routers")

    @property
    def indexer(self) -> IndexerPlan | None:
        """The plan for training indexers; None if they are not trained."""
        return self.features.get("indexer")

    @property
    def teacher(self) -> TeacherPlan | None:
        """The plan of a teacher that runs beside the model; None without one."""
        return self.features.get("teacher")

    @property
    def task(self) -> Task:
        """The model's task: causal LM or sequence classification."""
        return task_of(self.objective)

    @cached_property
    def described(self) -> DescribedModel:
        """Names and shapes of the model's tensors, and of its teacher's if there is one."""
        return described(self.hf_config, self.task, teacher=None if self.teacher is None else self.teacher.hf_config)

    def is_untrained(self, name: str) -> bool:
        """Whether no loss of the run trains the parameter `name`. Indexers are untrained if `indexer` is None. If only
        indexers are trained, all other parameters are untrained.
        """
        indexer = None if self.indexer is None else self.indexer.section
        return not is_reached(name, self.family, indexer)

    @property
    def head_outputs(self) -> int:
        """Number of outputs of the head: classes or scores of a document, or the vocabulary size."""
        return self.objective.num_outputs or int(self.hf_config.vocab_size)

    @property
    def quantised(self) -> tuple[str, ...]:
        """Names of the modules with four-bit weights."""
        return tuple(target.name for target in self.lora.quantised) if self.lora is not None else ()


def task_of(objective: Objective | ObjectiveConfig) -> Task:
    """The task of a model that is trained for the objective: causal LM or sequence classification."""
    return "sequence_classification" if objective.num_outputs else "causal_lm"
