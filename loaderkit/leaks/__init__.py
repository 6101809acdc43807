"""Does memory grow from epoch to epoch, what grows, and who holds it?

Read ``trend`` first (does one series grow; pure), then ``counter_trend`` and
``verdict`` (all counters and what was seen besides; pure), ``watch`` and
``shared_files`` (read the counters), ``census`` and ``blame`` (which objects became
more: a file in ``finders`` for each cause), ``trace`` (which lines allocate),
``investigate`` (puts it together), ``detector`` (``LeakDetector``), ``report`` and
``page`` (what you see) and ``pytest_plugin``.
"""
