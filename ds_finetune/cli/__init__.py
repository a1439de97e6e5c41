"""The program `ds-finetune`: each module here implements a command or a family of commands."""
