"""Will it fit, what to change, why did it die?

Read in this order: ``messages`` (what an error text says), ``oom`` (what it means),
``remedies`` (what can be changed, in order), ``environment`` (settings that do not do
what they look like), ``track`` (a step without a device and without float memory),
``estimate`` (its peak), ``surrogate`` (any batch's peak from its sizes), ``batch``
(the largest batch that fits), ``micro_batch`` (a step that survives running out).
"""
