"""What a piece of a step changes, and how it is put back."""

from __future__ import annotations

from typing import Any

import torch


class StepState:
    """Random numbers and buffers before a piece."""

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, device_of(model)
        self.buffers = [buffer.clone() for buffer in model.buffers()]
        self.numbers = torch.get_rng_state()
        self.on_device = None
        if self.device.type != "cpu":
            module = torch.get_device_module(self.device)
            self.on_device = module.get_rng_state()

    def restore(self) -> None:
        """Put them back."""
        with torch.no_grad():
            for buffer, old in zip(self.model.buffers(), self.buffers, strict=True):
                buffer.copy_(old)
        torch.set_rng_state(self.numbers)
        if self.on_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.on_device)


def device_of(model: Any) -> torch.device:
    """Give the device of the first parameter; the CPU if there is none."""
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def copied_grads(parameters: list[Any]) -> list[Any]:
    """Copy the gradients there are."""
    return [None if p.grad is None else p.grad.clone() for p in parameters]


def take_grads(parameters: list[Any]) -> list[Any]:
    """Set the gradients so far aside, so that a piece makes its own."""
    kept = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return kept


def put_grads(parameters: list[Any], grads: list[Any]) -> None:
    """Put gradients back."""
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


def add_grads(parameters: list[Any], kept: list[Any]) -> None:
    """Add a piece's gradients to those that were set aside."""
    for parameter, old in zip(parameters, kept, strict=True):
        if old is not None:
            new = parameter.grad
            parameter.grad = old if new is None else old.add_(new)
