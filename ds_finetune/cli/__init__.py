"""The program `ds-finetune`: each module of this package implements a command or a family of commands."""
