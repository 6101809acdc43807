"""What ``len`` was told of epochs, and whether others were read by it.  Pure.

Epochs differ in their numbers of batches where these are limited by size.  Trainers ask
for the length once, and read as many batches in each epoch (Lightning 2.6, Hugging
Face's Trainer 5.24): of longer ones they leave the last batches unread.
"""

from __future__ import annotations

import warnings

from loaderkit.units import count_of


class LengthsTold:
    """The lengths that were told, and of which epochs."""

    def __init__(self) -> None:
        # Few: as many as there are different lengths.
        self._epoch_of_length: dict[int, int | None] = {}
        self.has_warned = False
        """Once is enough: every epoch is read in the same way."""

    def tell(self, length: int, epoch: int | None) -> None:
        """Note an answer.

        Args:
            length: The number of batches that was told.
            epoch: The epoch that begins next: who asks before it begins asks for this
                one.  None while one is read.
        """
        if epoch is None:
            # Who asks then, say for a log, may count by an earlier answer.
            self._epoch_of_length.setdefault(length, None)
        else:
            self._epoch_of_length[length] = epoch

    def has_told(self, length: int) -> bool:
        """Tell whether a length was told of some epoch."""
        return length in self._epoch_of_length

    def is_read_by_another(self, batches: int, epoch: int, length: int) -> bool:
        """Tell whether an epoch was left where another epoch's length ends.

        Args:
            batches: How many batches of the epoch were read.
            epoch: Its number.
            length: How many batches it has.
        """
        is_left = batches < length and self.has_told(batches)
        # Who was told the length of this very epoch has left it on purpose.
        return is_left and not self.is_told(epoch, length)

    def is_told(self, epoch: int, length: int) -> bool:
        """Tell whether this length was told of this epoch, before it was read."""
        return self._epoch_of_length.get(length) == epoch

    def longest_below(self, length: int) -> int | None:
        """Give the longest that was told and is less; None if a longer one was."""
        lengths = self._epoch_of_length
        if not lengths or max(lengths) >= length:
            return None
        return max(lengths)

    def warn_of_left_epoch(
        self,
        batches: int,
        epoch: int,
        length: int,
        samples: int,
        *,
        sizes_vary: bool,
        stacklevel: int,
    ) -> None:
        """Warn that the end of an epoch was not read.

        Args:
            batches: How many of its batches were read.
            epoch: Its number.
            length: How many batches it has.
            samples: How many samples the others have.
            sizes_vary: Shuffled samples come in batches limited by size.
            stacklevel: As for ``warnings.warn``, counted from the caller of this.
        """
        self.has_warned = True
        text = f"epoch {epoch:,} was left after {batches:,} of its "
        text += f"{count_of(length, 'batches')}, "
        other = self._epoch_of_length[batches]
        told = "another epoch" if other in {None, epoch} else f"epoch {other:,}"
        text += f"as many as len(loader) told of {told}: "
        text += f"{count_of(samples, 'samples')} of it "
        text += f"{'was' if samples == 1 else 'were'} not read. "
        text += _reason_and_fix(sizes_vary=sizes_vary)
        warnings.warn(text, UserWarning, stacklevel=stacklevel + 1)

    def warn_of_longer_epoch(
        self, epoch: int, length: int, told: int, *, sizes_vary: bool, stacklevel: int
    ) -> None:
        """Warn where an epoch begins that is longer than any length that was told.

        Args:
            epoch: Its number.
            length: How many batches it has.
            told: The longest that was told.
            sizes_vary: Shuffled samples come in batches limited by size.
            stacklevel: As for ``warnings.warn``, counted from the caller of this.
        """
        self.has_warned = True
        text = (
            f"epoch {epoch:,} has {count_of(length, 'batches')}, and the last length "
        )
        text += f"that was asked for was {told:,}: who reads as many, as Hugging "
        text += f"Face's Trainer does, leaves the last {length - told:,} unread. "
        text += _reason_and_fix(sizes_vary=sizes_vary)
        warnings.warn(text, UserWarning, stacklevel=stacklevel + 1)


def _reason_and_fix(*, sizes_vary: bool) -> str:
    own_loop = "in a loop of your own read to the end, or ask len before each epoch"
    if not sizes_vary:
        return f"The dataset has probably grown since it was asked; {own_loop}"
    text = "Epochs of shuffled samples differ in their batches where these are limited "
    text += "by size. build_loader(..., shuffle='batches') makes as many in each; "
    text += "Lightning can count anew, Trainer(callbacks=[WholeEpochs(loader)], "
    text += "reload_dataloaders_every_n_epochs=1), from "
    return f"{text}loaderkit.integrations.lightning; {own_loop}"
