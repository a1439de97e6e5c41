"""The engine, which drives DeepSpeed: start, step, evaluation, generation, and the state for checkpoints."""

from ds_finetune.patches.deepspeed_import import import_without_compiler, import_without_mlflow
from ds_finetune.patches.transformers_import import import_what_is_used

import_without_mlflow()
import_without_compiler()
import_what_is_used()
