"""What this machine has, and how memory moves between processes and devices.

Read ``counters`` first (the names of all readings) and ``machine`` (limits of a process
and abilities of a device, as values), then ``host`` and ``probes`` (which read them,
and what a device holds), ``process`` and ``reading`` (``read_memory``), ``meter`` (over
time), ``holder``, ``holders`` and ``root_search`` (who keeps an object), ``release``,
``staged`` and ``cache_cleaner`` (giving back), and what batches are made in:
``shm_batch`` (one segment of shared memory) and ``page_locked``.
"""
