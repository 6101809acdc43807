"""Settings of a process that decide how much memory it has, and which do nothing.

Read in this order.  ``allocator_options`` lists the options of torch's allocators,
``allocator_conf`` follows torch's readers of their settings, ``mend_settings`` writes
down what a mistyped one was meant to be, ``allocator_settings`` judges them;
``native_readers`` and ``process_settings`` do the same for CUDA, OpenMP (its
processors: ``openmp_places``), MKL and glibc; ``settings`` reads this process and
changes it.
"""
