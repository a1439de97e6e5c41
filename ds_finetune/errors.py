"""The errors of this program: `FinetuneError` with a subclass for each kind. Each has an exit code."""

USER_ERROR_EXIT_CODE = 2
"""Exit code for invalid input: configuration, data, model folder, hostfile or output folder."""
RUN_ERROR_EXIT_CODE = 1
"""Exit code of a run that failed after it had started, and of other unexpected failures."""
INTERRUPTED_EXIT_CODE = 3
"""Exit code of a run that saved and ended after a signal; the same command resumes it."""


class FinetuneError(Exception):
    """An error for the user. `message` says what is wrong with which values, and `hint` says what to do."""

    exit_code = USER_ERROR_EXIT_CODE

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """The message and the hint, each on its own line."""
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(FinetuneError):
    """The run file, an override, a DeepSpeed JSON or a launcher's environment is invalid, or two of them conflict."""


class DependencyError(FinetuneError):
    """A package is missing or outside its tested range, or its source differs where this program patches it."""


class LaunchError(FinetuneError):
    """Ranks cannot be launched: a launcher's environment, a hostfile or a host is wrong."""


class DataError(FinetuneError):
    """A data file, a row, a template or a tokenizer is wrong."""


class ModelError(FinetuneError):
    """A model folder, its config or its weights are wrong."""


class OutputError(FinetuneError):
    """The output folder cannot be written or is too small."""


class CheckpointError(FinetuneError):
    """A checkpoint is missing, incomplete, damaged or of another run."""


class ExportError(FinetuneError):
    """An exported folder is invalid, or a model cannot be exported."""


class VerificationError(ExportError):
    """An exported model, after reloading, computes other values than the trained one."""

    exit_code = RUN_ERROR_EXIT_CODE


class ServeError(FinetuneError):
    """A server cannot be started, or ended unexpectedly."""


class RewardError(FinetuneError):
    """A reward function failed or returned an invalid value, or a data row lacks a field that a reward needs."""

    exit_code = RUN_ERROR_EXIT_CODE


class RunError(FinetuneError):
    """A run that had started cannot continue."""

    exit_code = RUN_ERROR_EXIT_CODE
