"""A kind of device is known to readings and to estimates."""

from loaderkit.budget.step.devices import TRAITS
from loaderkit.memory.probes import PROBES


def test_every_kind_of_device_has_a_probe_and_traits():
    assert set(TRAITS) == {*PROBES, "cpu"}
