"""Does memory grow from epoch to epoch, what grows, and who holds it?

Read ``trend`` first (does one series grow; pure), which asks ``significance`` (is the
growth clear of its ``noise``), ``shapes`` (has it ended), ``saws_and_stairs`` and
``late_growth`` (has it just begun), then ``counter_trend`` and ``verdict`` (all
counters and what was seen besides; pure), ``watch`` and ``shared_files`` (read the
counters), ``census`` and ``blame`` (which objects became more: a file in ``finders``
for each cause), ``trace`` (which lines allocate), ``investigate`` (puts it together),
``run`` (a run, and what of it was told), ``detector`` (``LeakDetector``), ``checks``
and ``pytest_plugin`` (tests), and ``report`` and ``page`` (what you see).

What else there is, by what you look for: ``students_t`` (the distribution);
``recorded_series`` (what was read, epoch by epoch); ``lows`` and ``throttle`` (whether
objects are worth counting, and how often); ``retained`` and ``unrooted`` (what an
object keeps, and what keeps one that no variable leads to); ``own_objects`` (what is
there because we watch); ``growth``, ``patterns`` and ``periods`` (what is said of a
leak, what helps against it, and what its epochs are called); ``epoch_functions`` (what
is refused as an epoch); ``watch_child`` and ``watch_process`` (``loaderkit watch``).
"""
