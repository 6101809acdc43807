"""What this machine has, and how memory moves between processes and devices.

Read ``host`` first (limits of this process), then ``probes`` (what a device can do and
holds), ``process`` and ``reading`` (``read_memory``), ``meter`` (over time),
``holders`` and ``nearest`` (who keeps an object), ``release``, ``staged`` and
``hygiene`` (giving back), and ``parcel`` (a batch as one segment of shared memory).
"""
