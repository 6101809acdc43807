"""Will it fit, what to change, why did it die?

Read in this order.  Why it died: ``oom_patterns`` and ``messages`` (what an error text
says), ``judge`` (what the numbers mean), ``remedies`` (what can be changed, in order),
``oom`` (the diagnosis), ``environment`` and ``settings`` (variables that do not do what
they look like).  Will it fit: ``train_step`` (one training step), ``fake_tensors``,
``track`` and ``allocation_log`` (the step without float memory; ``tracker``,
``accumulation`` and ``values`` are its parts), ``kernel_calls`` and ``kernels`` (what
kernels hold inside), ``measure`` and ``extend`` (small real steps, where tracking is
not possible), ``allocator`` (what a cache would hold), ``peaks`` and ``estimate`` (the
peak), ``samples`` and ``surrogate`` (any batch's peak from its sizes), ``cost_model``
and ``batch`` (the largest that fits), ``savings`` (what each remedy saves),
``assertions`` (a test that it fits).  Training all the same: ``pieces``,
``micro_batch`` with ``step_state``, ``comparison`` and ``ranks``.
"""
