"""The state that a piece of a step changes, and how it is restored."""

from __future__ import annotations

import torch


class StepState:
    """The random state and the buffers before a piece."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.device = device_of(model)
        self.buffers = [buffer.clone() for buffer in model.buffers()]
        self.random_state = random_state(self.device)

    def restore_buffers(self) -> None:
        """Restore the buffers."""
        with torch.no_grad():
            buffers = self.model.buffers()
            for buffer, before in zip(buffers, self.buffers, strict=True):
                buffer.copy_(before)

    def restore(self) -> None:
        """Restore the buffers and the random state."""
        self.restore_buffers()
        cpu_state, *device_states = self.random_state
        torch.set_rng_state(cpu_state)
        for state in device_states:
            torch.get_device_module(self.device).set_rng_state(state)


class SpectralVectors:
    """The vectors of spectral norms before a batch, from which every piece starts.

    Each forward pass in training makes one step of a power iteration, whatever the data
    is.  The whole batch makes one step.  Pieces would make one each, and then divide
    the weights by another norm than the whole batch does (gradients were 30 % off).
    """

    def __init__(self, model: torch.nn.Module) -> None:
        # Both implementations in torch keep two vectors for each weight.  Their names
        # end in _u and _v.
        buffers = dict(model.named_buffers())
        vectors = []
        for name, buffer in buffers.items():
            partner = f"{name.removesuffix('_u')}_v"
            if name.endswith("_u") and partner in buffers:
                vectors += [buffer, buffers[partner]]
        self._vectors = vectors
        self._before = [vector.clone() for vector in vectors]

    def restore(self) -> None:
        """Restore the vectors."""
        with torch.no_grad():
            for vector, before in zip(self._vectors, self._before, strict=True):
                vector.copy_(before)


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Give the state of the CPU's random generator, and of the device's own."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return states


def device_of(model: torch.nn.Module) -> torch.device:
    """Give the device of the first parameter; the CPU if there is none."""
    first = next(iter(model.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def copied_grads(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    """Copy the gradients; None where a parameter has none."""
    return [
        None if parameter.grad is None else parameter.grad.clone()
        for parameter in parameters
    ]


def take_grads(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor | None]:
    """Detach the gradients from the parameters, so that a piece computes its own."""
    grads = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return grads


def put_grads(
    parameters: list[torch.nn.Parameter], grads: list[torch.Tensor | None]
) -> None:
    """Set the gradients of parameters."""
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad


def add_grads(
    parameters: list[torch.nn.Parameter], grads: list[torch.Tensor | None]
) -> None:
    """Add the gradients of a piece to those of the pieces before."""
    for parameter, grad_before in zip(parameters, grads, strict=True):
        if grad_before is not None:
            grad = parameter.grad
            # In place, so that there is never a third gradient.
            parameter.grad = grad_before if grad is None else grad_before.add_(grad)
