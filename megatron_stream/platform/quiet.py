"""Megatron-core without what it says to everybody."""

from __future__ import annotations

import logging
import warnings


def quiet_megatron() -> None:
    """It says in six places that optional packages are missing, prints its buckets, and uses old names of torch's."""
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category)
    logging.getLogger("megatron.core").setLevel(logging.WARNING)
