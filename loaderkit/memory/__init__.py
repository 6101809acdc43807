"""What this machine has, and how memory moves between processes and devices.

Read ``counters`` first (the names of all readings) and ``machine`` (limits of a process
and abilities of a device, as values), then ``host`` and ``probes`` (which read them,
and what a device holds), ``process`` and ``reading`` (``read_memory``), ``meter`` (over
time; ``timeline_page`` shows it), ``tensors`` (which are alive), ``holder``,
``holders`` and ``root_search`` (who keeps an object; ``frames`` looks at local
variables, ``source`` finds the line that makes one grow), ``release``, ``staged`` and
``cache_cleaner`` (giving back; ``clibrary`` asks the C library to), and what batches
are made in: ``shm_batch`` (one segment of shared memory, of ``shm_segments``, and what
is not tensors as ``tensorless_pickles``) and ``page_locked``.
"""
