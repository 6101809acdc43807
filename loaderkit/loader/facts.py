"""What a loader's plan follows from, as values.  Pure.

``read_facts`` reads them from the machine, the device and the dataset, and ``probe``
measures what reading costs.  They are here so that ``decisions``, ``plan`` and
``forecast`` can take them without importing torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from loaderkit.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loaderkit.forking import ForkHazard
    from loaderkit.memory.machine import Capability, Host

PROBE_S = 0.1
"""The probe stops after so long, but reads one sample at least."""


@dataclass(frozen=True)
class ReadCost:
    """What reading costs here, measured on this machine."""

    samples: int
    """Samples that were read for it."""
    sample_bytes: int
    """Bytes of one sample in a batch, on average."""
    batch_bytes: int
    """Bytes of one batch."""
    fetch_s: float
    """To read and join one batch."""
    sample_s: float
    """To read the very first sample, opening what it needs."""
    send_s: float
    """To put a batch into shared memory, in a worker."""
    receive_s: float
    """To take it out, in the training process."""
    device: str = ""
    """What a batch, or a part of it, lies on, such as "cuda:0"; empty: on the host."""
    unsendable: str = ""
    """Why a batch cannot leave a worker; empty: it can, or no whole one was made."""
    probe_s: float = 0.0
    """What all this measuring took."""

    def cost_in_words(self) -> str:
        """Say what the probe took, if that was longer than it shall take."""
        if self.probe_s < 2 * PROBE_S:
            return ""
        text = f"took {format_seconds(self.probe_s)}: a sample takes "
        return f"{text}{format_seconds(self.sample_s)}; probe=False reads none"


@dataclass(frozen=True)
class Facts:
    """All that a plan follows from."""

    host: Host
    """Limits of this process."""
    device: Capability
    """What the device can do."""
    samples: int | None
    """Samples of the dataset; None where it does not say."""
    iterable: bool = False
    """It is iterated rather than indexed."""
    gathering: bool = False
    """Batches come from a cache, finished, and no code of the user's runs."""
    draws_no_random_numbers: bool = False
    """Making a batch draws no random numbers: no code of the user's runs."""
    largest_bytes: int | None = None
    """Bound of a batch's bytes, from the sizes of all samples; None if unknown."""
    measured: ReadCost | None = None
    """What reading costs; None when it was not measured."""
    later_epoch_bytes: int | None = None
    """What epochs after the first read, of a store whose shards are then on local disk;
    None for other datasets, and where the mirror is too small for them."""
    unmeasured: str = ""
    """Why it was not, where that was not asked for."""
    start_method: str = "fork"
    """How workers start unless told otherwise."""
    start_methods: tuple[str, ...] = ("fork", "spawn", "forkserver")
    """How they can start here."""
    unsendable: str = ""
    """Why the dataset cannot be sent to a spawned worker; empty when it can."""
    sending_fix: str = ""
    """What to do about that."""
    fork_is_sound: bool = True
    """Libraries of this system go on working in a forked process: not on macOS."""
    fork_hazard: ForkHazard | None = None
    """What the dataset holds that does not survive a fork."""
    batch_device: str = ""
    """The device that batches lie on as they are made, such as "cuda:0"; empty where
    they are made on the host, as far as is known."""
    parcels: bool = True
    """Batches can travel as one anonymous segment (Linux)."""
    daemonic: bool = False
    """This process may not have children."""
    lockless: str = ""
    """Why processes cannot share a lock here, without which there are no workers; empty
    where they can."""
    notebook: bool = False
    """Code is typed into a notebook."""
    under_pytest: bool = False
    """A test is running."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that begin with ``LOADERKIT_``."""

    @property
    def batch_bytes(self) -> int | None:
        """Bytes of the largest batch that is known of; None if none is."""
        measured_bytes = None if self.measured is None else self.measured.batch_bytes
        known = [
            nbytes
            for nbytes in (self.largest_bytes, measured_bytes)
            if nbytes is not None
        ]
        return max(known, default=None)
