"""Whether workers that are started anew can be sent what they need, and if not, why.

And whether they may be forked in place of that.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import TYPE_CHECKING, Any

import torch

from loaderkit.forking import find_fork_hazard
from loaderkit.memory.shm_batch import named_in_pickle
from loaderkit.spawning import why_no_new_process, why_not_importable

if TYPE_CHECKING:
    from collections.abc import Mapping


def why_unsendable(parts: Mapping[str, Any], method: str) -> str:
    """Find what keeps objects from travelling to a worker that is started anew.

    Args:
        parts: Objects by name.
        method: How the worker would be started.

    Returns:
        The path of the part that cannot be pickled, or be made again from its pickle,
        and why; or why no process can be started anew.  Empty when all can.
    """
    return why_no_new_process(method) or _why_parts_unsendable(parts)


def can_fork(**parts: object) -> bool:
    """Tell whether forked processes would find all as it is in this one.

    Args:
        parts: What they would use, by name.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        return False
    # macOS can fork, but its own libraries may end a process that did.
    if sys.platform == "darwin":
        return False
    drivers: tuple[Any, ...] = (torch.cuda, torch.xpu)
    if any(driver.is_initialized() for driver in drivers):
        return False  # what has begun with either does not survive a fork
    return find_fork_hazard(**parts) is None


def _why_parts_unsendable(parts: Mapping[str, Any]) -> str:
    for name, part in parts.items():
        reason = _why_part_unsendable(name, part)
        if reason:
            return reason
    return ""


def _why_part_unsendable(name: str, part: Any) -> str:
    try:
        named_objects = named_in_pickle(part)
    except Exception as error:  # noqa: BLE001 - any class may refuse in any way
        attributes = getattr(part, "__dict__", {})
        inside = {f"{name}.{key}": attributes[key] for key in attributes}
        text = f"{name}: {type(error).__name__}: {error}"
        return _why_parts_unsendable(inside) or text
    for named in named_objects:
        reason = why_not_importable(named)
        if reason:
            return f"{name}: {reason}"
    return ""
