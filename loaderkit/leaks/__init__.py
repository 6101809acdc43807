"""Does memory grow from epoch to epoch, what grows, and who holds it?

Read ``trend`` first (one counter, pure), then ``verdict`` (all counters, pure),
``watch`` and ``shared_files`` (read the counters), ``census`` and ``blame`` (which
objects became more, and who holds them), ``trace`` (which lines allocate), ``detector``
(``LeakDetector``), ``report`` and ``page`` (what you see) and ``pytest_plugin``.
"""
