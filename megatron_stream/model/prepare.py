"""From `model.path` to a checked Hugging Face folder; known small models are made once, in a cache."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from megatron_stream.model.hf import check_model_folder
from megatron_stream.model.smollm2 import write_smollm2
from megatron_stream.model.tiny import tiny_spec, write_tiny_model

MAKERS: dict[str, Callable[[Path], None]] = {
    "smollm2-135m-instruct": write_smollm2,
    "tiny": lambda folder: write_tiny_model(folder, tiny_spec(tied=True)),
    "tiny-untied": lambda folder: write_tiny_model(folder, tiny_spec(tied=False)),
}


def cache_folder() -> Path:
    """`$MEGATRON_STREAM_CACHE`, or a folder in the user's cache."""
    given = os.environ.get("MEGATRON_STREAM_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "megatron-stream"


def resolve_model(path_or_name: str) -> Path:
    """The folder of a known name (made if absent) or of a path, checked.

    Made models appear whole: they are written aside and renamed. Concurrent callers wait for the first.
    Raises UserError for a folder that cannot be used.
    """
    if path_or_name not in MAKERS:
        folder = Path(path_or_name).expanduser().absolute()
        check_model_folder(folder)
        return folder
    folder = cache_folder() / "models" / path_or_name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{path_or_name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            aside = folder.with_name(f".{path_or_name}.partial")
            shutil.rmtree(aside, ignore_errors=True)
            MAKERS[path_or_name](aside)
            aside.rename(folder)
    check_model_folder(folder)
    return folder
