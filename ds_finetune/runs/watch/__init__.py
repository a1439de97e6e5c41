"""`ds-finetune watch`: a local page that shows a folder of runs while they train. It only reads."""
