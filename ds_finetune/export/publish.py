"""`export --push-to-hub`: uploads an exported folder to a new private repository of the hub, in one commit.

Files stored by an interrupted push are not sent again: the hub knows them by their digests, and a repository without a
commit of this program is filled.
"""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import validate_repo_id

from ds_finetune.errors import ConfigError, ExportError
from ds_finetune.export.verify.record import UNVERIFIED
from ds_finetune.foreign.hub_access import without_password

_MADE_BY_HUB = {".gitattributes"}
"""Files that the hub creates in a new repository."""


def check_repository(name: str) -> None:
    """ConfigError where `name` is not `OWNER/NAME`; called before the export."""
    try:
        validate_repo_id(name)
    except HFValidationError as wrong:
        raise ConfigError(f"--push-to-hub {name}: {wrong}", hint="write OWNER/NAME") from None
    if name.count("/") != 1:
        raise ConfigError(f"--push-to-hub {name} names no owner", hint="write OWNER/NAME")


def push_to_hub(folder: Path, name: str) -> str:
    """Upload `folder` to the repository `name`, which is created as private; returns its URL.

    ExportError where the folder is UNVERIFIED, the hub refuses, or the repository has files already. No message
    contains the token.
    """
    check_repository(name)
    if (folder / UNVERIFIED).is_file():
        raise ExportError(f"`{folder}` is {UNVERIFIED}", hint=f"verify it: ds-finetune export --check {folder}")
    api, again = HfApi(), f"ds-finetune export --check {folder} --push-to-hub {name} sends what is missing"
    try:
        url = str(api.create_repo(name, private=True, exist_ok=True))
        files = sorted(set(api.list_repo_files(name)) - _MADE_BY_HUB)
        if files:
            raise ExportError(
                f"the repository `{name}` exists and holds {len(files)} files, e.g. {files[0]}",
                hint="name a new one, or delete that one on its page",
            )
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload by ds_finetune")
    except LocalTokenNotFoundError:
        raise ExportError(
            f"no token for {without_password(api.endpoint)}", hint="`hf auth login`, or set HF_TOKEN"
        ) from None
    except (HfHubHTTPError, RuntimeError, OfflineModeIsEnabled, HTTPError, OSError) as failed:
        # An upload wraps errors in a RuntimeError (huggingface_hub 2.4, _commit_api.py:530).
        cause = failed.__cause__ if isinstance(failed, RuntimeError) else failed
        answer = cause.response.status_code if isinstance(cause, HfHubHTTPError) else type(cause).__name__
        raise ExportError(
            f"the push of `{name}` to {without_password(api.endpoint)} has failed: {answer}",
            hint=f"check HF_TOKEN and the network; {again}",
        ) from None
    return url
