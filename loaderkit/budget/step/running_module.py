"""Which module of a model runs, in the forward pass and in the backward pass."""

from __future__ import annotations

from typing import Any

import torch


class RunningModule:
    """Names the module whose operators run."""

    def __init__(self) -> None:
        self.name = ""
        """Of the module that computes; empty outside of all."""
        self._name_of_node: dict[int, str] = {}

    def note_node(self) -> None:
        """Remember which module's operator a node of autograd belongs to.

        Autograd numbers its nodes, and makes that of an operator before it calls the
        operator: the last number given is that of the node.
        """
        if self.name and torch.is_grad_enabled():
            last_number = torch._C._autograd._get_sequence_nr() - 1
            self._name_of_node[last_number] = self.name

    def name_now(self) -> str:
        """Name the module that computes, or whose operator is differentiated."""
        return self.name or self._name_differentiated()

    def _name_differentiated(self) -> str:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        return self._name_of_node.get(node._sequence_nr(), "")
