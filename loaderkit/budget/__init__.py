"""Will it fit, what to change, why did it die?

Read in this order.  Why it died: ``wordings`` and ``messages`` (what an error text
says), ``judge`` (what the numbers mean), ``remedies`` (what can be changed, in order),
``oom`` (the diagnosis), ``environment`` and ``settings`` (variables that do not do what
they look like).  Will it fit: ``steps`` (one training step), ``fakes``, ``track`` and
``log`` (the step without float memory), ``measure``, ``calibrate`` (small real ones),
``allocator`` (what a cache would hold), ``peaks`` and ``estimate`` (the peak),
``samples`` and ``surrogate`` (any batch's peak from its sizes), ``solve`` and ``batch``
(the largest that fits), ``gains`` (what each remedy saves), ``gate`` (a test that it
fits).  Training all the same: ``pieces`` and ``micro_batch``.
"""
