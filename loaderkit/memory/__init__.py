"""What this machine has, and how memory moves between processes and devices.

Read ``counters`` first (the names of all readings), then ``host`` (limits of this
process), ``probes`` (what a device can do and holds), ``process`` and ``reading``
(``read_memory``), ``meter`` (over time), ``holder``, ``holders`` and ``root_search``
(who keeps an object), ``release``, ``staged`` and ``cache_cleaner`` (giving back), and
``shm_batch`` (a batch as one segment of shared memory).
"""
