"""The errors of this program: `FinetuneError` and a subclass per stage, which `cli` turns into an exit code."""

USER_ERROR_EXIT_CODE = 2
"""Exit code for invalid input: configuration, data, model folder, hostfile, output folder."""
RUN_ERROR_EXIT_CODE = 1
"""Exit code of a run that failed after it had started."""
INTERRUPTED_EXIT_CODE = 3
"""Exit code of a run that a signal ended after it had saved; the same command resumes it."""


class FinetuneError(Exception):
    """An error for the user: `message` says what went wrong with which values, and `hint` what to do."""

    exit_code = USER_ERROR_EXIT_CODE

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Message and hint on one line each."""
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class ConfigError(FinetuneError):
    """The run file, an override, a DeepSpeed JSON or a launcher's environment is invalid, or two contradict."""


class DependencyError(FinetuneError):
    """An installed package is outside its tested range, or differs where this program patches it."""


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
    """An exported folder is invalid, or a model cannot be exported."""


class VerificationError(ExportError):
    """An exported model, loaded again, computes other values than the trained one."""

    exit_code = RUN_ERROR_EXIT_CODE


class ServeError(FinetuneError):
    """A server cannot be started, or it has ended without being told to."""


class RewardError(FinetuneError):
    """A reward, and not the answer that it should score, is at fault; or a record lacks what a reward needs."""

    exit_code = RUN_ERROR_EXIT_CODE


class RunError(FinetuneError):
    """A run that had started cannot continue."""

    exit_code = RUN_ERROR_EXIT_CODE
