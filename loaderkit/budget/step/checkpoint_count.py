"""Counts the blocks that the backward pass of a step computes again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loaderkit.budget.step.accumulation import node_name

if TYPE_CHECKING:
    from loaderkit.budget.step.allocation_log import Log


class CheckpointCount:
    """Counts them, whoever asked for it: the step, the model, or a library's layer."""

    def __init__(self, log: Log) -> None:
        """Begin a step.

        Args:
            log: Gets the most of any step.
        """
        self._log = log
        self._is_computing_again = False
        self._of_step = 0

    def begin_step(self) -> None:
        """Begin another step of the same training."""
        self._of_step = 0

    def note_operator(self, *, is_backward: bool) -> None:
        """Tell by an operator whether a block is computed again.

        Gradients are enabled there, while a node of autograd runs, and in no formula;
        between two blocks come formulas of the second.
        """
        is_within_node = is_backward and torch.is_grad_enabled() and bool(node_name())
        if is_within_node:
            self.note_block()
        self._is_computing_again = is_within_node

    def note_block(self) -> None:
        """Note that the backward pass computes a block again.

        A module that begins tells too: a block of a single operator, such as a table of
        words, ends before its operator is called, when all that is asked for is saved.
        """
        if not self._is_computing_again:
            self._of_step += 1
            self._log.checkpoints = max(self._log.checkpoints, self._of_step)
        self._is_computing_again = True
