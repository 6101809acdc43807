"""What this machine has, and how memory moves between processes and devices.

Read ``host`` first (limits of this process), then ``probes`` (what a device can do and
holds), ``process`` and ``reading`` (``read_memory``), ``meter`` (over time),
``holders`` and ``root_search`` (who keeps an object), ``release``, ``staged`` and
``cache_cleaner`` (giving back), and ``shm_batch`` (a batch as one segment of shared
memory).
"""
