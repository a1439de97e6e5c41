"""`ds-finetune doctor`: checks every host of a run before it starts, and reports what is wrong on which host."""
