"""The one root error and a leaf per stage; `cli` prints them once and turns them into an exit code."""

USER_ERROR_EXIT_CODE = 2
"""Exit code of a mistake in what the user gave: configuration, data, model folder, hostfile, output folder."""
RUN_ERROR_EXIT_CODE = 1
"""Exit code of a run that failed after it had started."""
INTERRUPTED_EXIT_CODE = 3
"""Exit code of a run that a signal ended after it had saved; the same command resumes it."""


class FinetuneError(Exception):
    """What went wrong, with the values that disagree (`message`), and what to do (`hint`)."""

    exit_code = USER_ERROR_EXIT_CODE

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Message and hint on one line each."""
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(FinetuneError):
    """The run file, an override, a DeepSpeed JSON or a launcher's environment is wrong or contradicts another."""


class DependencyError(FinetuneError):
    """An installed package differs from the tested version where this program changes its code."""


class LaunchError(FinetuneError):
    """A launcher's environment or a hostfile cannot be understood."""


class DataError(FinetuneError):
    """A data file, a row, a template or a tokenizer is wrong."""


class ModelError(FinetuneError):
    """A model folder, its config or its weights are wrong."""


class OutputError(FinetuneError):
    """The output folder cannot be written or is too small."""


class CheckpointError(FinetuneError):
    """A checkpoint is missing, incomplete, damaged or of another run."""


class ExportError(FinetuneError):
    """An exported folder is not what it should be."""


class VerificationError(ExportError):
    """What was exported, reloaded, does not compute what the model did."""

    exit_code = RUN_ERROR_EXIT_CODE


class ServeError(FinetuneError):
    """A server cannot be started, or ended by itself."""


class RunError(FinetuneError):
    """A run that had started cannot continue."""

    exit_code = RUN_ERROR_EXIT_CODE
