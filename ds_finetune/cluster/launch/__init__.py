"""`ds-finetune launch`: starts a run on many hosts, and ends it on all of them."""
