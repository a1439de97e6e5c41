"""One run from its configuration to its report; `train.py` is the page to read first."""

from ds_finetune.patches.deferred_compiler import keep_compiler_out

keep_compiler_out()
