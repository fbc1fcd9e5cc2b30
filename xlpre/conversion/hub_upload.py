"""Upload of an exported folder to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import httpx
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from xlpre.common.errors import InputError
from xlpre.conversion.model_folder import CARD_FILE

NEW_REPOSITORY_ADVICE = f"; add `--exclude {CARD_FILE}` if the repository already has a model card"


def finish_export(source: Path, target: Path, repository: str | None) -> None:
    """Print notes on the model card of the export in `target`, then upload the export if a `repository` is given.

    Raises:
        InputError: the upload failed; see `upload`.
    """
    if (source / CARD_FILE).exists():
        print(f"{source / CARD_FILE} was not copied: {target / CARD_FILE} is a new model card")
    print(f"fill in license and language in {target / CARD_FILE} before you publish the model")
    if repository:
        print(upload(target, repository))


def check_repository(name: str) -> None:
    """Raise InputError unless `name` has the form OWNER/NAME of a repository of the Hub. The Hub is not contacted."""
    try:
        validate_repo_id(name)
        is_valid = name.count("/") == 1
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise InputError(
            f"--push={name} is invalid: it must name a repository of the Hugging Face Hub. Write OWNER/NAME, such as me/my-xlnet."
        )


def upload(folder: Path, repository: str) -> str:
    """Upload an exported folder. A new repository is private. An existing model card is kept.

    Args:
        folder: the folder.
        repository: OWNER/NAME.

    Returns:
        Sentence about the result, with the address of the repository.

    Raises:
        InputError: the upload failed. The message has the reason, a remedy, and the command that repeats the upload.
    """
    api, has_card = HfApi(), None
    try:
        url = api.create_repo(repository, private=True, exist_ok=True)
        has_card = api.file_exists(repository, CARD_FILE)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload the model",
            ignore_patterns=[CARD_FILE] if has_card else None,
        )
    except (HfHubHTTPError, httpx.HTTPError, OSError) as error:
        exclude = f" --exclude {CARD_FILE}" if has_card else ""
        advice = NEW_REPOSITORY_ADVICE if has_card is None else ""
        raise InputError(
            f"--push {repository} failed: {_explain(error)} The export in {folder} is complete. Upload it with "
            f"`hf upload {repository} {folder} . --private{exclude}`{advice}."
        ) from None
    kept = (
        f". Its model card was kept; to replace it, run `hf upload {repository} {folder / CARD_FILE} {CARD_FILE}`"
        if has_card
        else ""
    )
    return f"uploaded to {url}{kept}"


def _explain(error: Exception) -> str:
    """Return the reason of a failed request and a remedy, as sentences."""
    if isinstance(error, OfflineModeIsEnabled):
        return "the environment variable HF_HUB_OFFLINE is set. Unset it."
    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else None
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        return "you are not logged in to the Hugging Face Hub. Run `hf auth login`."
    if status == 403:
        return "your token may not write to this repository. Run `hf auth login` with a token that may."
    if status is not None:
        message = " ".join((getattr(error, "server_message", None) or str(error)).split()).rstrip(".")
        return f"the Hub refused the upload with status {status} ({message}). Correct that, or try again later."
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return f"the Hugging Face Hub cannot be reached ({reason}). Check the network."
