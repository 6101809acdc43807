"""The seed that a loader's order and random numbers follow from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loaderkit.loader.decisions import Decision

if TYPE_CHECKING:
    from loaderkit.loader.options import LoaderOptions
    from loaderkit.loader.ranks import Ranks


def choose_seed(options: LoaderOptions, ranks: Ranks) -> Decision[int]:
    """Choose a seed that every rank chooses alike.

    Args:
        options: What was asked for.
        ranks: Who this process is.

    Returns:
        The one that was asked for, else one that torch draws.  Several ranks cannot
        draw one, since as a rule each has seeded torch with another number, so that
        they would shuffle apart; asking the others would hang where only some build
        a loader.  They take 0, as torch's DistributedSampler does.
    """
    if options.seed is not None:
        reason = "order and random numbers follow from it alone"
        if ranks.is_distributed:
            reason += "; the same on every rank, which is compared when the first "
            reason += "epoch begins if torch.distributed is initialized then"
        return Decision(options.seed, reason)
    if ranks.is_distributed and options.generator is None:
        reason = "the same on every rank, as in torch's DistributedSampler; ask for "
        return Decision(0, f"{reason}another")
    drawn = torch.empty((), dtype=torch.int64).random_(generator=options.generator)
    return Decision(int(drawn), "order and random numbers follow from it alone")
