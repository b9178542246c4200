"""Models of the Hugging Face hub: fetched, listed and removed through the hub's own cache."""

from pathlib import Path
from typing import Any

from buddy.errors import FetchError, ModelError
from buddy.hub.wrap_errors import reason


def pull_from_hub(hub_id: str, *, config_only: bool = False) -> str:
    """Fetch a model's config and tokenizer, and the safetensors that it names; return the folder.

    Nothing else is fetched: no code, and no second copy of the weights in another form. What is in
    the hub's cache already is not fetched again, and needs no network.

    Args:
        hub_id: `ORG/NAME`, or `ORG/NAME@REVISION`: a branch, a tag or a commit.
        config_only: Fetch config.json alone.

    Raises:
        FetchError: No such model, no access, or no network.
        CheckpointError: Its index of weights is damaged.
    """
    from buddy.hub.config import CONFIG, GENERATION_CONFIG
    from buddy.hub.tokenizer import TEMPLATES, TOKENIZER_FILES
    from buddy.hub.weights import INDEX, weight_names

    if config_only:
        return _fetch(hub_id, [CONFIG])
    names = [CONFIG, GENERATION_CONFIG, INDEX, *TOKENIZER_FILES, f"{TEMPLATES}/*.jinja"]
    return _fetch(hub_id, [*names, *weight_names(Path(_fetch(hub_id, names)))])


def _fetch(hub_id: str, patterns: list[str]) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, _, revision = hub_id.partition("@")
    try:
        return str(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except GatedRepoError as error:
        raise FetchError(
            f"{hub_id} is gated: accept its licence on the hub's page of it, then run "
            "`hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise FetchError(f"the hub has no revision {revision!r} of {name}: check it") from error
    except RepositoryNotFoundError as error:
        raise FetchError(
            f"the hub has no model {name}, or shows it to its owners alone: check the name, or "
            "run `hf auth login`"
        ) from error
    except (OSError, ValueError) as error:
        # Where the network fails, its own error is the cause, and the hub's is a paragraph.
        is_unreached = isinstance(error, LocalEntryNotFoundError)
        cause = (error.__cause__ if is_unreached else None) or error
        raise FetchError(
            f"{hub_id} cannot be fetched from the hub: {reason(cause)}; check the name and the "
            "network"
        ) from error


def hub_repos() -> dict[str, Any]:
    """Models in the hub's cache: id -> what huggingface_hub knows of it."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return {}
    return {repo.repo_id: repo for repo in cache.repos if repo.repo_type == "model"}


def remove_from_hub_cache(hub_id: str) -> int:
    """Delete a model from the hub's cache; return the bytes freed.

    Raises:
        ModelError: It is not there.
    """
    from huggingface_hub import scan_cache_dir

    repo = hub_repos().get(hub_id)
    if repo is None:
        raise ModelError(f"{hub_id} is not in the hub's cache: see `buddy models`")
    revisions = [revision.commit_hash for revision in repo.revisions]
    strategy = scan_cache_dir().delete_revisions(*revisions)
    strategy.execute()
    return int(strategy.expected_freed_size)
