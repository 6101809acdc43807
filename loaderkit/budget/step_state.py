"""What a piece of a step changes, and how it is put back."""

from __future__ import annotations

from typing import Any

import torch


class StepState:
    """Random numbers and buffers before a piece."""

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, device_of(model)
        self.buffers = [buffer.clone() for buffer in model.buffers()]
        self.numbers = random_state(self.device)

    def restore_buffers(self) -> None:
        """Put the buffers back."""
        with torch.no_grad():
            for buffer, old in zip(self.model.buffers(), self.buffers, strict=True):
                buffer.copy_(old)

    def restore(self) -> None:
        """Put both back."""
        self.restore_buffers()
        torch.set_rng_state(self.numbers[0])
        for numbers in self.numbers[1:]:
            torch.get_device_module(self.device).set_rng_state(numbers)


class SpectralVectors:
    """The vectors of spectral norms before a batch, from which all pieces begin.

    Each forward pass in training takes one step of a power iteration, whatever the
    data.  The whole batch takes one; pieces would take one each, and divide the weights
    by another number than the whole (gradients were 30 % off).
    """

    def __init__(self, model: Any) -> None:
        # Both of torch's spectral norms keep two vectors, named so, for each weight.
        buffers = dict(model.named_buffers())
        self.vectors = [
            (vector, vector.clone())
            for name, buffer in buffers.items()
            if name.endswith("_u") and f"{name[:-1]}v" in buffers
            for vector in (buffer, buffers[f"{name[:-1]}v"])
        ]

    def restore(self) -> None:
        """Put them back."""
        with torch.no_grad():
            for vector, old in self.vectors:
                vector.copy_(old)


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Give the state of random numbers: the CPU's, and a device's own."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return states


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
